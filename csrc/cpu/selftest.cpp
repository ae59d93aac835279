// Is an instruction set right on this machine? A fixed set of calls on it and on `plain`, compared.
//
// All through the C ABI: what is tested is what is used, threads and the cutting of work included.
#include <cmath>
#include <cstring>
#include <exception>
#include <tuple>
#include <vector>

#include "codec.h"
#include "context.h"

namespace phloem {
namespace {

constexpr int kThreads = 2;
constexpr double kExact = 1e-4, kRounded = 2e-2;  // of the greatest value

struct Wrong {};  // error_text says what

struct Random {
    uint64_t state = 1;
    float next() {  // -1 ... 1
        state = state * 6364136223846793005u + 1442695040888963407u;
        return (float)((int64_t)(state >> 33) - (1 << 30)) / (float)(1 << 30);
    }
};

// Numbers of either dtype.
struct Values {
    int32_t dtype;
    std::vector<float> f;
    std::vector<uint16_t> h;

    Values(int32_t dtype_, int64_t n) : dtype(dtype_), f(n), h(dtype_ == PHLOEM_BF16 ? n : 0) {}
    Values(int32_t dtype_, int64_t n, Random &random, float scale = 1) : Values(dtype_, n) {
        for (int64_t i = 0; i < n; ++i) set(i, random.next() * scale);
    }
    void set(int64_t i, float x) {
        if (dtype == PHLOEM_F32) {
            f[i] = x;
            return;
        }
        uint32_t u;
        memcpy(&u, &x, 4);
        h[i] = (uint16_t)(u >> 16);
    }
    float at(int64_t i) const {
        if (dtype == PHLOEM_F32) return f[i];
        const uint32_t u = (uint32_t)h[i] << 16;
        float x;
        memcpy(&x, &u, 4);
        return x;
    }
    void *data() { return dtype == PHLOEM_F32 ? (void *)f.data() : (void *)h.data(); }
    int64_t size() const { return (int64_t)f.size(); }
};

void must(int32_t code) {
    if (code != PHLOEM_OK) throw Wrong{};
}

void compare(const Values &got, const Values &want, double tolerance, const char *what, int a,
             int b, int c) {
    double top = 1, worst = 0;
    for (int64_t i = 0; i < want.size(); ++i) top = std::max(top, (double)std::fabs(want.at(i)));
    for (int64_t i = 0; i < want.size(); ++i) {
        const double off = std::fabs((double)got.at(i) - want.at(i));
        worst = off <= tolerance * top ? std::max(worst, off) : INFINITY;  // NaN is not <=
        if (std::isinf(worst)) {
            fail(PHLOEM_E_WRONG, "%s (%d, %d, %d): %g is %g", what, a, b, c, want.at(i), got.at(i));
            throw Wrong{};
        }
    }
}

// Of the pages that layers and attention are tested with.
constexpr int kKvHeads = 2, kDim = 32, kPage = 4, kTokens = 141;
constexpr int kPages = (kTokens + kPage - 1) / kPage;

phloem_kv_layer pool(void *base, int32_t dtype) {
    phloem_kv_layer kv{};
    kv.base = base;
    kv.head_stride = part_items(dtype, kDim);
    kv.token_stride = kKvHeads * kv.head_stride;
    kv.kv_stride = kPage * kv.token_stride;
    kv.page_stride = kv.group_stride = 2 * kv.kv_stride;
    kv.num_pages = kPages;
    kv.heads_per_group = kv.num_kv_heads = kKvHeads;
    kv.page_size = kPage;
    kv.head_dim = kDim;
    kv.dtype = dtype;
    return kv;
}

// One request of kTokens, its pages in falling order. Batches borrow it.
class OneRow {
public:
    OneRow() {
        for (int p = 0; p < kPages; ++p) table_[p] = kPages - 1 - p;
        for (int t = 0; t < kTokens; ++t) positions_[t] = t;
    }
    // Of tokens first ... end - 1; good until the next one.
    phloem_batch batch(int32_t first, int32_t end) {
        start_[1] = end - first;
        phloem_batch batch{};
        batch.tables = table_;
        batch.table_stride = kPages;
        batch.num_rows = 1;
        batch.row_start = start_;
        batch.positions = positions_ + first;
        batch.num_tokens = end - first;
        return batch;
    }

private:
    int64_t table_[kPages];
    int32_t positions_[kTokens], start_[2] = {0, 0};
};

class Test {
public:
    Test(phloem_ctx *plain, phloem_ctx *tested) : plain_(plain), tested_(tested) {}

    void run() {
        for (int32_t format : {PHLOEM_W_F32, PHLOEM_W_BF16, PHLOEM_W_Q8_0})
            for (int32_t dtype : {PHLOEM_F32, PHLOEM_BF16})
                for (int m : {1, 7, 16, 17, 40, 300}) {
                    product(format, dtype, m, 48, 64);
                    product(format, dtype, m, 50, 37);
                    product(format, dtype, m, 100, 160);
                }
        for (int32_t gate : {PHLOEM_GATE_SILU, PHLOEM_GATE_GELU_TANH})
            for (int m : {1, 20, 37}) gated(gate, m);
        for (int m : {2, 15, 16, 31, 32, 33, 70, 290, 600}) rows_alone(m);
        for (int32_t dtype : {PHLOEM_F32, PHLOEM_BF16}) {
            layer(dtype, 0, false);
            layer(dtype, 7, true);
        }
        for (int32_t rows : {PHLOEM_KV_INT8, PHLOEM_KV_FP8, PHLOEM_KV_FP4})
            for (int32_t heads : {4, 32}) packed_pages(rows, heads);
        sampling();
    }

private:
    struct Packed {
        std::vector<char> bytes;
        std::vector<float> bias;
        phloem_weight weight{};
    };

    Packed pack(int32_t format, int64_t n, int64_t k, bool gate_up, float scale = 1) {
        Values w(PHLOEM_F32, n * k, random_, scale);
        Packed p;
        p.bytes.resize(phloem_packed_bytes(format, n, k) + 64);
        char *at = p.bytes.data() + (64 - (uintptr_t)p.bytes.data() % 64) % 64;
        if (gate_up)
            must(phloem_pack_gate_up(format, w.data(), w.f.data() + n / 2 * k, PHLOEM_F32, n / 2, k,
                                     k, at));
        else must(phloem_pack_weight(format, w.data(), PHLOEM_F32, n, k, k, at));
        p.bias = Values(PHLOEM_F32, n, random_).f;
        p.weight = {at, gate_up ? nullptr : p.bias.data(), n, k, format, 0};
        return p;
    }

    static phloem_gemm_args args_of(Values &x, Values &y, const Packed &w, int64_t m,
                                    int32_t gate) {
        const int64_t width = gate ? w.weight.n / 2 : w.weight.n;
        phloem_gemm_args args{};
        args.x = x.data();
        args.y = y.data();
        args.w = &w.weight;
        args.m = m;
        args.x_stride = w.weight.k;
        args.y_stride = width;
        args.x_dtype = x.dtype;
        args.y_dtype = y.dtype;
        args.gate = gate;
        return args;
    }

    void product(int32_t format, int32_t dtype, int m, int n, int k) {
        const Packed w = pack(format, n, k, false);
        Values x(dtype, (int64_t)m * k, random_), residual(dtype, (int64_t)m * n, random_);
        Values want(dtype, (int64_t)m * n), got = want;
        for (auto [ctx, y] : {std::pair{plain_, &want}, std::pair{tested_, &got}}) {
            phloem_gemm_args args = args_of(x, *y, w, m, PHLOEM_GATE_NONE);
            args.residual = residual.data();
            args.residual_stride = n;
            args.residual_dtype = dtype;
            must(phloem_gemm(ctx, &args));
        }
        const bool rounded = format == PHLOEM_W_BF16 || dtype == PHLOEM_BF16;
        compare(got, want, rounded ? kRounded : kExact, "product", m, n, k);
    }

    void gated(int32_t gate, int m) {
        const Packed w = pack(PHLOEM_W_BF16, 96, 80, true);
        Values x(PHLOEM_BF16, m * 80, random_), want(PHLOEM_F32, m * 48), got = want;
        phloem_gemm_args args = args_of(x, want, w, m, gate);
        must(phloem_gemm(plain_, &args));
        args = args_of(x, got, w, m, gate);
        must(phloem_gemm(tested_, &args));
        compare(got, want, kExact, "gated product", gate, m, 0);
    }

    // A row among others is what it is alone, to the last bit.
    void rows_alone(int m) {
        const Packed w = pack(PHLOEM_W_BF16, 100, 100, false);
        Values x(PHLOEM_BF16, m * 100, random_), all(PHLOEM_F32, m * 100), alone(PHLOEM_F32, 100);
        phloem_gemm_args args = args_of(x, all, w, m, PHLOEM_GATE_NONE);
        must(phloem_gemm(tested_, &args));
        for (int row : {0, m / 2, m - 1}) {
            args = args_of(x, alone, w, 1, PHLOEM_GATE_NONE);
            args.x = x.h.data() + row * 100;
            must(phloem_gemm(tested_, &args));
            if (memcmp(alone.f.data(), all.f.data() + row * 100, 400) == 0) continue;
            fail(PHLOEM_E_WRONG, "row %d of %d is another one alone", row, m);
            throw Wrong{};
        }
    }

    // All but one of the tokens, then that one, through one layer: hidden states and pages.
    void layer(int32_t dtype, int32_t window, bool gemma) {
        constexpr int kHidden = 64, kHeads = 4, kInner = 96;
        const Packed qkv = pack(PHLOEM_W_BF16, (kHeads + 2 * kKvHeads) * kDim, kHidden, false, 0.2f);
        const Packed o = pack(PHLOEM_W_BF16, kHidden, kHeads * kDim, false, 0.2f);
        const Packed gate_up = pack(PHLOEM_W_BF16, 2 * kInner, kHidden, true, 0.2f);
        const Packed down = pack(PHLOEM_W_BF16, kHidden, kInner, false, 0.2f);
        const std::vector<float> ones(kHidden, 1.0f);
        Values angles(PHLOEM_F32, kTokens * kDim, random_);
        phloem_layer layer{};
        layer.attn_norm = layer.mlp_norm = ones.data();
        if (gemma) {
            layer.q_norm = layer.k_norm = layer.post_attn_norm = layer.post_mlp_norm = ones.data();
            layer.softcap = 3.0f;
        }
        layer.cos = angles.f.data();
        layer.sin = angles.f.data() + kTokens * kDim / 2;
        layer.qkv = qkv.weight;
        layer.o = o.weight;
        layer.gate_up = gate_up.weight;
        layer.down = down.weight;
        layer.max_position = kTokens;
        layer.hidden = kHidden;
        layer.num_heads = kHeads;
        layer.rotary_dim = kDim;
        layer.window = window;
        layer.norm_eps = 1e-5f;
        layer.scale = 0.2f;
        layer.gate = gemma ? PHLOEM_GATE_GELU_TANH : PHLOEM_GATE_SILU;
        const Values start(dtype, kTokens * kHidden, random_);
        const Values empty(dtype, (int64_t)kPages * 2 * kPage * kKvHeads * kDim);
        Values want = start, got = start, want_pages = empty, got_pages = empty;
        pass(plain_, layer, want, want_pages);
        pass(tested_, layer, got, got_pages);
        compare(got, want, kRounded, "layer", dtype, window, gemma);
        compare(got_pages, want_pages, kRounded, "pages of a layer", dtype, window, gemma);
    }

    static void pass(phloem_ctx *ctx, const phloem_layer &layer, Values &hidden, Values &pages) {
        const phloem_kv_layer kv = pool(pages.data(), pages.dtype);
        OneRow row;
        constexpr int64_t kLast = kTokens - 1;
        phloem_batch batch = row.batch(0, kLast);
        must(phloem_layer_forward(ctx, &layer, &kv, &batch, hidden.data(), hidden.dtype));
        batch = row.batch(kLast, kTokens);
        char *one = (char *)hidden.data() + kLast * layer.hidden * dtype_bytes(hidden.dtype);
        must(phloem_layer_forward(ctx, &layer, &kv, &batch, one, hidden.dtype));
    }

    // The same K and V become the same bytes; a chunk and a single token attend over them.
    void packed_pages(int32_t rows, int32_t heads) {
        constexpr int64_t kWidth = kKvHeads * kDim;
        Values k(PHLOEM_F32, kTokens * kWidth, random_, 3);
        Values v(PHLOEM_F32, kTokens * kWidth, random_, 9);
        Values q(PHLOEM_F32, kTokens * heads * kDim, random_);
        Values want(PHLOEM_F32, q.size()), got = want;
        std::vector<char> bytes[2];
        for (auto [ctx, out, held] : {std::tuple{plain_, &want, &bytes[0]},
                                      std::tuple{tested_, &got, &bytes[1]}}) {
            held->assign(kPages * 2 * kPage * kKvHeads * part_items(rows, kDim), 0);
            write_and_attend(ctx, pool(held->data(), rows), heads, k, v, q, *out);
        }
        if (bytes[0] != bytes[1]) {
            fail(PHLOEM_E_WRONG, "packed rows of format %d are other bytes", rows);
            throw Wrong{};
        }
        compare(got, want, kExact, "attention over packed pages", rows, heads, 0);
    }

    static void write_and_attend(phloem_ctx *ctx, const phloem_kv_layer &kv, int32_t heads,
                                 Values &k, Values &v, Values &q, Values &out) {
        OneRow row;
        phloem_batch batch = row.batch(0, kTokens);
        phloem_rope_args rope{};
        rope.k = k.data();
        rope.v = v.data();
        rope.k_stride = rope.v_stride = kKvHeads * kDim;
        must(phloem_rope_kv_write(ctx, &rope, &kv, &batch));
        phloem_attention_args args{};
        args.q = q.data();
        args.out = out.data();
        args.q_stride = args.out_stride = heads * kDim;
        args.num_heads = heads;
        args.scale = 0.2f;
        batch = row.batch(0, kTokens - 1);
        must(phloem_attention(ctx, &args, &kv, &batch));
        batch = row.batch(kTokens - 1, kTokens);
        args.q = q.f.data() + (kTokens - 1) * args.q_stride;
        args.out = out.f.data() + (kTokens - 1) * args.out_stride;
        must(phloem_attention(ctx, &args, &kv, &batch));
    }

    void sampling() {
        constexpr int kLogits = 1000, kTop = 40;
        Values logits(PHLOEM_F32, kLogits, random_, 20);
        int64_t best[2], indices[2][kTop];
        float values[2][kTop], lse[2];
        for (int i : {0, 1}) {
            phloem_ctx *ctx = i ? tested_ : plain_;
            must(phloem_argmax(ctx, logits.data(), PHLOEM_F32, 1, kLogits, kLogits, &best[i]));
            must(phloem_top_k(ctx, logits.data(), PHLOEM_F32, kLogits, kTop, values[i], indices[i],
                              &lse[i]));
        }
        if (best[0] == best[1] && !memcmp(indices[0], indices[1], sizeof indices[0]) &&
            std::fabs(lse[0] - lse[1]) < 1e-3f)
            return;
        fail(PHLOEM_E_WRONG, "sampling: token %lld is %lld", (long long)best[0], (long long)best[1]);
        throw Wrong{};
    }

    phloem_ctx *plain_, *tested_;
    Random random_;
};

}  // namespace
}  // namespace phloem

extern "C" int32_t phloem_self_test(int32_t isa) {
    using namespace phloem;
    phloem_ctx *tested = phloem_ctx_create(isa, kThreads);
    if (!tested) return PHLOEM_E_ISA;
    phloem_ctx *plain = phloem_ctx_create(PHLOEM_ISA_PLAIN, kThreads);
    int32_t code = plain ? PHLOEM_OK : PHLOEM_E_MEMORY;
    try {
        if (plain) Test(plain, tested).run();
    } catch (const Wrong &) {
        code = PHLOEM_E_WRONG;
    } catch (const std::exception &error) {
        code = fail(PHLOEM_E_MEMORY, "self-test: %s", error.what());
    }
    if (plain) phloem_ctx_destroy(plain);
    phloem_ctx_destroy(tested);
    return code;
}
