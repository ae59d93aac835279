#include "context.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "processor.h"

namespace phloem {
namespace {

thread_local char error_text[256];

// Whoever wants more runs phloem_self_test first.
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

namespace {

bool present(int32_t isa) {
#if defined(PHLOEM_EMULATE)
    return isa >= 0 && isa < PHLOEM_NUM_ISAS && isa != PHLOEM_ISA_AVX512 &&
           (isa == PHLOEM_ISA_PLAIN || cpu_features().avx2);
#else
    const CpuFeatures &cpu = cpu_features();
    switch (isa) {
        case PHLOEM_ISA_PLAIN: return true;
#if defined(PHLOEM_HAVE_X86)
        case PHLOEM_ISA_AVX2: return cpu.avx2;
        case PHLOEM_ISA_AVX512: return cpu.avx512;
#endif
#if defined(PHLOEM_HAVE_AVX512BF16)
        case PHLOEM_ISA_AVX512BF16: return cpu.avx512bf16;
#endif
#if defined(PHLOEM_HAVE_AMX)
        case PHLOEM_ISA_AMX: return cpu.amx;
#endif
        default: return (void)cpu, false;
    }
#endif
}

bool tiles_allowed() {
#if defined(PHLOEM_EMULATE)
    return true;
#else
    return tiles_granted();
#endif
}

// The kernels of an instruction set that is present.
const Kernels *kernels_of(int32_t isa) {
#if defined(PHLOEM_EMULATE)
    return isa == PHLOEM_ISA_PLAIN ? &kKernelsPlain : &kKernelsAvx2;
#elif defined(PHLOEM_HAVE_X86)
    if (isa >= PHLOEM_ISA_AVX512) return &kKernelsAvx512;
    if (isa == PHLOEM_ISA_AVX2) return &kKernelsAvx2;
#endif
    return (void)isa, &kKernelsPlain;
}

const Bf16Kernels *bf16_of(int32_t isa) {
#if defined(PHLOEM_HAVE_AVX512BF16)
    if (isa == PHLOEM_ISA_AVX512BF16) return &kBf16Avx512;
#endif
#if defined(PHLOEM_HAVE_AMX)
    if (isa == PHLOEM_ISA_AMX) return &kBf16Amx;
#endif
    return (void)isa, nullptr;
}

const AmxAttention *amx_of(int32_t isa) {
#if defined(PHLOEM_HAVE_AMX)
    if (isa == PHLOEM_ISA_AMX) return &kAmxAttention;
#endif
    return (void)isa, nullptr;
}

}  // namespace

}  // namespace phloem

phloem_ctx::phloem_ctx(int32_t isa_, int num_threads)
    : isa(isa_), kernels(phloem::kernels_of(isa_)), bf16(phloem::bf16_of(isa_)),
      amx(phloem::amx_of(isa_)), pool(num_threads) {}

extern "C" {

int32_t phloem_abi_version(void) { return PHLOEM_ABI_VERSION; }
const char *phloem_last_error(void) { return phloem::error_text; }

int32_t phloem_isa_supported(int32_t isa) { return phloem::present(isa); }

int32_t phloem_best_isa(void) {
    int32_t isa = phloem::kBestProvenIsa;
    while (isa > 0 && !phloem::present(isa)) --isa;
    return isa;
}

phloem_ctx *phloem_ctx_create(int32_t isa, int32_t num_threads) {
    if (!phloem::present(isa)) {
        phloem::fail(PHLOEM_E_ISA, "instruction set %d is not supported here", isa);
        return nullptr;
    }
    if (isa == PHLOEM_ISA_AMX && !phloem::tiles_allowed()) {
        phloem::fail(PHLOEM_E_ISA, "the system refuses AMX tiles to this process");
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
