#include "context.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <new>

namespace phloem {
namespace {

thread_local char error_text[256];

// AVX-512 is compiled from the same source but has not run on such a machine yet: only on request.
constexpr int32_t kBestProvenIsa = PHLOEM_ISA_AVX2;

}  // namespace

int32_t fail(int32_t code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(error_text, sizeof error_text, format, args);
    va_end(args);
    return code;
}

Buffer::~Buffer() { free(data_); }

void *Buffer::reserve(int64_t bytes) {
    if (bytes <= bytes_) return data_;
    const int64_t want = (bytes + bytes / 4 + 63) / 64 * 64;
    void *grown = aligned_alloc(64, (size_t)want);
    if (!grown) throw std::bad_alloc();
    free(data_);
    data_ = grown;
    bytes_ = want;
    ++grows_;
    return data_;
}

const Kernels *kernels_of(int32_t isa) {
    switch (isa) {
        case PHLOEM_ISA_PLAIN: return &kKernelsPlain;
#if defined(PHLOEM_HAVE_X86)
        case PHLOEM_ISA_AVX2:
            return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                           __builtin_cpu_supports("f16c")
                       ? &kKernelsAvx2
                       : nullptr;
        case PHLOEM_ISA_AVX512:
            return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512dq") &&
                           __builtin_cpu_supports("avx512vl") &&
                           __builtin_cpu_supports("f16c")
                       ? &kKernelsAvx512
                       : nullptr;
#endif
        default: return nullptr;
    }
}

}  // namespace phloem

phloem_ctx::phloem_ctx(int32_t isa_, int num_threads)
    : isa(isa_), kernels(phloem::kernels_of(isa_)), pool(num_threads) {}

extern "C" {

int32_t phloem_abi_version(void) { return PHLOEM_ABI_VERSION; }
const char *phloem_last_error(void) { return phloem::error_text; }

int32_t phloem_isa_supported(int32_t isa) { return phloem::kernels_of(isa) != nullptr; }

int32_t phloem_best_isa(void) {
    int32_t isa = phloem::kBestProvenIsa;
    while (isa > 0 && !phloem::kernels_of(isa)) --isa;
    return isa;
}

phloem_ctx *phloem_ctx_create(int32_t isa, int32_t num_threads) {
    if (!phloem::kernels_of(isa)) {
        phloem::fail(PHLOEM_E_ISA, "instruction set %d is not supported here", isa);
        return nullptr;
    }
    if (num_threads < 1 || num_threads > 1024) {
        phloem::fail(PHLOEM_E_ARG, "num_threads must be 1 ... 1024, got %d", num_threads);
        return nullptr;
    }
    try {
        return new phloem_ctx(isa, num_threads);
    } catch (const std::exception &error) {
        phloem::fail(PHLOEM_E_MEMORY, "no context: %s", error.what());
        return nullptr;
    }
}

void phloem_ctx_destroy(phloem_ctx *ctx) { delete ctx; }
int32_t phloem_ctx_num_threads(const phloem_ctx *ctx) { return ctx->pool.size(); }
int32_t phloem_ctx_isa(const phloem_ctx *ctx) { return ctx->isa; }

int64_t phloem_ctx_workspace_bytes(const phloem_ctx *ctx) {
    return ctx->x.bytes() + ctx->xq.bytes() + ctx->scratch.bytes() + ctx->parts.bytes() +
           ctx->normed.bytes() + ctx->qkv.bytes() + ctx->activation.bytes();
}

int64_t phloem_ctx_workspace_grows(const phloem_ctx *ctx) {
    return ctx->x.grows() + ctx->xq.grows() + ctx->scratch.grows() + ctx->parts.grows() +
           ctx->normed.grows() + ctx->qkv.grows() + ctx->activation.grows();
}

}  // extern "C"
