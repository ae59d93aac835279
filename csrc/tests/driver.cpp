// Stand-alone check of the kernels for sanitizer builds: every buffer is exactly as large as the
// call may touch, unread pages hold NaN, results are compared with plain double loops.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "bf16_model.h"
#include "phloem_cpu.h"

namespace {

std::mt19937 rng(7);
int failures = 0;

float normal() { return std::normal_distribution<float>()(rng); }
int uniform(int low, int high) { return std::uniform_int_distribution<int>(low, high)(rng); }

uint16_t to_bf16(float x) { return model::rounded(x); }
float from_bf16(uint16_t h) { return model::widened(h); }
// Whether products with bf16 weights round what they multiply.
bool rounds(const phloem_ctx *ctx) { return phloem_ctx_isa(ctx) >= PHLOEM_ISA_AVX512BF16; }

// An array of either dtype in a heap block of its exact size.
struct Array {
    int32_t dtype;
    std::vector<float> f;
    std::vector<uint16_t> h;

    Array(int32_t dtype_, size_t n, bool nan = false) : dtype(dtype_) {
        if (dtype == PHLOEM_F32) f.resize(n);
        else h.resize(n);
        for (size_t i = 0; i < n; ++i) set(i, nan ? NAN : normal());
    }
    void set(size_t i, float x) {
        if (dtype == PHLOEM_F32) f[i] = x;
        else h[i] = std::isnan(x) ? 0x7fc0 : to_bf16(x);
    }
    float at(size_t i) const { return dtype == PHLOEM_F32 ? f[i] : from_bf16(h[i]); }
    void *data() { return dtype == PHLOEM_F32 ? (void *)f.data() : (void *)h.data(); }
};

void expect(bool ok, const char *what, double detail = 0) {
    if (ok) return;
    printf("FAILED: %s (%g)\n", what, detail);
    ++failures;
}

void close_to(double got, double want, double tolerance, const char *what) {
    expect(std::fabs(got - want) <= tolerance * (1 + std::fabs(want)), what, got - want);
}

double tolerance(int32_t dtype) { return dtype == PHLOEM_F32 ? 1e-4 : 2e-2; }

void check_gemm(phloem_ctx *ctx, int32_t format, int32_t dtype, int m, int n, int k) {
    Array x(dtype, (size_t)m * k), w(PHLOEM_F32, (size_t)n * k), y(dtype, (size_t)m * n);
    std::vector<float> bias(n);
    for (float &b : bias) b = normal();
    std::vector<char> packed(phloem_packed_bytes(format, n, k));
    expect(phloem_pack_weight(format, w.data(), PHLOEM_F32, n, k, k, packed.data()) == 0, "pack");
    Array residual = y;
    phloem_weight weight{packed.data(), bias.data(), n, k, format, 0};
    phloem_gemm_args args{x.data(), y.data(), y.data(), &weight, m, k, n, n, dtype, dtype, dtype, 0};
    expect(phloem_gemm(ctx, &args) == 0, phloem_last_error());
    if (format == PHLOEM_W_BF16 && rounds(ctx))
        for (size_t i = 0; i < (size_t)m * k; ++i) x.set(i, from_bf16(to_bf16(x.at(i))));
    const double slack = format == PHLOEM_W_Q8_0 ? 0.05 * std::sqrt(k) : tolerance(dtype) * 2;
    for (int i = 0; i < m; ++i)
        for (int j = 0; j < n; ++j) {
            double sum = bias[j] + residual.at((size_t)i * n + j);
            for (int t = 0; t < k; ++t) {
                float v = w.at((size_t)j * k + t);
                sum += (double)x.at((size_t)i * k + t) *
                       (format == PHLOEM_W_BF16 ? from_bf16(to_bf16(v)) : v);
            }
            close_to(y.at((size_t)i * n + j), sum, slack, "gemm");
        }
}

#if defined(PHLOEM_EMULATE)
// Bit for bit what the documented order of the instructions gives, for ragged sizes, any number of
// rows and threads; some values are so small that their products are denormal.
void check_exact(phloem_ctx *ctx, int32_t dtype, int m, int n, int k, bool tiny) {
    std::vector<model::Row> x(m, model::Row(k)), w(n, model::Row(k));
    Array xs(dtype, (size_t)m * k), ws(PHLOEM_F32, (size_t)n * k), y(PHLOEM_F32, (size_t)m * n);
    for (int i = 0; i < m * k; ++i) {
        if (tiny && i % 3) xs.set(i, xs.at(i) * (i % 2 ? 1e-25f : 1e-38f));
        x[i / k][i % k] = to_bf16(xs.at(i));
    }
    for (int i = 0; i < n * k; ++i) {
        if (tiny && i % 5) ws.set(i, ws.at(i) * 1e-13f);
        w[i / k][i % k] = to_bf16(ws.at(i));
    }
    std::vector<char> packed(phloem_packed_bytes(PHLOEM_W_BF16, n, k));
    expect(phloem_pack_weight(PHLOEM_W_BF16, ws.data(), PHLOEM_F32, n, k, k, packed.data()) == 0, "pack");
    phloem_weight weight{packed.data(), nullptr, n, k, PHLOEM_W_BF16, 0};
    phloem_gemm_args args{xs.data(), y.data(), nullptr, &weight, m, k, n, 0, dtype, PHLOEM_F32, 0, 0};
    expect(phloem_gemm(ctx, &args) == 0, phloem_last_error());
    const bool tiles = phloem_ctx_isa(ctx) == PHLOEM_ISA_AMX;
    for (int i = 0; i < m; ++i)
        for (int j = 0; j < n; ++j) {
            const float want = tiles ? model::tiles(x[i], w[j]) : model::dots(x[i], w[j]);
            expect(want == y.at((size_t)i * n + j), "exact order", want - y.at((size_t)i * n + j));
        }
}

void check_orders(phloem_ctx *ctx) {
    for (int32_t dtype : {PHLOEM_F32, PHLOEM_BF16})
        for (bool tiny : {false, true}) {
            for (int m : {1, 2, 8, 15, 16, 17, 31, 32, 33, 64, 75})
                check_exact(ctx, dtype, m, uniform(1, 140), uniform(1, 120), tiny);
            for (int m : {256, 301}) check_exact(ctx, dtype, m, uniform(30, 60), 64, tiny);
            for (int m : {1, 49, 800}) check_exact(ctx, dtype, m, uniform(30, 60), 1300, tiny);
        }
}
#endif

void check_blocks(phloem_ctx *ctx, int32_t format, int m, int n, int k) {
    const int bytes = format == PHLOEM_W_Q4_0 ? 18 : format == PHLOEM_W_Q4_1 ? 20 : 34;
    std::vector<uint8_t> raw((size_t)n * (k / 32) * bytes);
    std::vector<double> w((size_t)n * k);
    for (size_t b = 0; b < raw.size() / bytes; ++b) {
        uint8_t *at = &raw[b * bytes];
        for (int i = 0; i < bytes; ++i) at[i] = (uint8_t)uniform(0, 255);
        const uint16_t one_eighth = 0x3000, half = 0x3800;  // fp16
        memcpy(at, &one_eighth, 2);
        if (format == PHLOEM_W_Q4_1) memcpy(at + 2, &half, 2);
        for (int i = 0; i < 32; ++i) {
            double v;
            if (format == PHLOEM_W_Q8_0) v = 0.125 * (int8_t)at[2 + i];
            else {
                const int q = (at[bytes - 16 + i % 16] >> (i < 16 ? 0 : 4)) & 15;
                v = format == PHLOEM_W_Q4_0 ? 0.125 * (q - 8) : 0.125 * q + 0.5;
            }
            w[b * 32 + i] = v;
        }
    }
    Array x(PHLOEM_F32, (size_t)m * k), y(PHLOEM_F32, (size_t)m * n);
    std::vector<char> packed(phloem_packed_bytes(format, n, k));
    expect(phloem_pack_blocks(format, raw.data(), n, k, packed.data()) == 0, "pack blocks");
    phloem_weight weight{packed.data(), nullptr, n, k, format, 0};
    phloem_gemm_args args{x.data(), y.data(), nullptr, &weight, m, k, n, 0, 0, 0, 0, 0};
    expect(phloem_gemm(ctx, &args) == 0, phloem_last_error());
    for (int i = 0; i < m; ++i)
        for (int j = 0; j < n; ++j) {
            double sum = 0, size = 0;
            for (int t = 0; t < k; ++t) {
                const double p = x.at((size_t)i * k + t) * w[(size_t)j * k + t];
                sum += p;
                size += std::fabs(p);
            }
            expect(std::fabs(y.at((size_t)i * n + j) - sum) < 1e-4 * size, "blocks",
                   y.at((size_t)i * n + j) - sum);
        }
    std::vector<int32_t> ids{n - 1, 0};
    Array rows(PHLOEM_F32, 2 * k);
    expect(phloem_embedding(ctx, ids.data(), &weight, rows.data(), PHLOEM_F32, 2) == 0, "rows");
    for (int t = 0; t < k; ++t)
        close_to(rows.at(t), w[(size_t)(n - 1) * k + t], 1e-6, "a row of blocks");
}

// A pool whose every slot is NaN but those that the rows of a batch have written.
struct Pages {
    int group_heads, groups, page_size, dim, layers = 2;
    std::vector<int> contexts;
    std::vector<int64_t> tables;
    int64_t width = 0;
    Array pool;
    phloem_kv_layer kv{};

    static int64_t count_pages(const std::vector<int> &contexts, int page_size) {
        int64_t n = 2;
        for (int c : contexts) n += (c + page_size - 1) / page_size;
        return n;
    }
    Pages(int32_t dtype, int kv_heads, int groups_, int page_size_, int dim_,
          std::vector<int> contexts_)
        : group_heads(kv_heads / groups_), groups(groups_), page_size(page_size_), dim(dim_),
          contexts(std::move(contexts_)),
          pool(dtype, (size_t)count_pages(contexts, page_size_) * groups_ * 4 * page_size_ *
                          (kv_heads / groups_) * dim_, true) {
        for (int c : contexts) width = std::max<int64_t>(width, (c + page_size - 1) / page_size);
        const int64_t pages = count_pages(contexts, page_size);
        tables.assign(contexts.size() * width, 0);
        int64_t next = pages - 1;  // slots in falling order: neighbours are not neighbours
        for (size_t r = 0; r < contexts.size(); ++r)
            for (int p = 0; p * page_size < contexts[r]; ++p) tables[r * width + p] = next--;
        kv.token_stride = (int64_t)group_heads * dim;
        kv.head_stride = dim;
        kv.kv_stride = kv.token_stride * page_size;
        kv.group_stride = kv.kv_stride * 2 * layers;
        kv.page_stride = kv.group_stride * groups;
        kv.base = (char *)pool.data() + 2 * kv.kv_stride * (dtype == PHLOEM_F32 ? 4 : 2);
        kv.num_pages = pages;
        kv.heads_per_group = group_heads;
        kv.page_size = page_size;
        kv.num_kv_heads = kv_heads;
        kv.head_dim = dim;
        kv.dtype = dtype;
    }
    size_t index(int row, int position, int head, int is_v, int i) const {
        return tables[row * width + position / page_size] * kv.page_stride + 2 * kv.kv_stride +
               head / group_heads * kv.group_stride + is_v * kv.kv_stride +
               position % page_size * kv.token_stride + head % group_heads * kv.head_stride + i;
    }
};

// What rows of one layer may read, and tables that hold nothing before that.
struct Bounds {
    std::vector<int32_t> base, read_from, write_from;
    std::vector<int64_t> tables;
    int64_t width = 1;

    Bounds(const Pages &pages, const std::vector<int> &counts, int window, bool restarted) {
        for (size_t r = 0; r < counts.size(); ++r) {
            const int first = pages.contexts[r] - counts[r];
            read_from.push_back(restarted ? uniform(0, first) : 0);
            write_from.push_back(restarted ? uniform(0, pages.contexts[r]) : 0);
            base.push_back(low(r, first, window) / pages.page_size);
            width = std::max(width, num_pages(pages, r));
        }
        tables.assign(counts.size() * width, -1);
        for (size_t r = 0; r < counts.size(); ++r)
            for (int64_t p = 0; p < num_pages(pages, r); ++p)
                tables[r * width + p] = pages.tables[r * pages.width + base[r] + p];
    }
    int64_t num_pages(const Pages &pages, size_t r) const {
        return (pages.contexts[r] + pages.page_size - 1) / pages.page_size - base[r];
    }
    int low(size_t r, int position, int window) const {
        return std::max(read_from[r], window > 0 ? position - window + 1 : 0);
    }
    phloem_batch batch(const std::vector<int32_t> &starts,
                       const std::vector<int32_t> &positions) const {
        return {starts.data(), positions.data(), tables.data(), base.data(), read_from.data(),
                write_from.data(), width, (int32_t)base.size(), (int32_t)positions.size()};
    }
};

// K and V of positions below write_from keep what they hold, all others get what is given.
void check_write(phloem_ctx *ctx, int32_t dtype, Pages &pages, const Bounds &bounds,
                 const phloem_batch &batch) {
    const int heads = pages.kv.num_kv_heads, width = heads * pages.dim;
    Array k(dtype, (size_t)batch.num_tokens * width), v = k, before = pages.pool;
    phloem_rope_args args{};
    args.k = k.data();
    args.v = v.data();
    args.k_stride = args.v_stride = width;
    args.dtype = dtype;
    expect(phloem_rope_kv_write(ctx, &args, &pages.kv, &batch) == 0, phloem_last_error());
    for (int r = 0; r < batch.num_rows; ++r)
        for (int t = batch.row_start[r]; t < batch.row_start[r + 1]; ++t)
            for (int i = 0; i < 2 * width; ++i) {
                const int pos = batch.positions[t], head = i % width / pages.dim;
                const size_t at = pages.index(r, pos, head, i / width, i % pages.dim);
                const float want = pos < bounds.write_from[r] ? before.at(at)
                                                              : k.at((size_t)t * width + i % width);
                expect(pages.pool.at(at) == want, "write");
            }
    pages.pool = before;
}

struct Form {
    bool restarted;
    float softcap;
    bool sinks;
};

void check_attention(phloem_ctx *ctx, int32_t dtype, int heads, int kv_heads, int groups,
                     int page_size, int dim, int window, Form form = {}) {
    std::vector<int> contexts{1, uniform(2, 40), uniform(250, 300), uniform(90, 130)};
    std::vector<int> counts{1, uniform(1, contexts[1]), 1, uniform(2, 60)};
    Pages pages(dtype, kv_heads, groups, page_size, dim, contexts);
    const Bounds bounds(pages, counts, window, form.restarted);
    std::vector<int32_t> starts{0}, positions;
    for (size_t r = 0; r < contexts.size(); ++r) {
        const int first = contexts[r] - counts[r];
        for (int p = 0; p < contexts[r]; ++p)
            for (int h = 0; h < kv_heads; ++h)
                for (int i = 0; i < 2 * dim; ++i)
                    if (p >= bounds.low(r, first, window))
                        pages.pool.set(pages.index((int)r, p, h, i / dim, i % dim), normal());
        for (int p = first; p < contexts[r]; ++p) positions.push_back(p);
        starts.push_back((int32_t)positions.size());
    }
    const int n = (int)positions.size();
    phloem_batch batch = bounds.batch(starts, positions);
    check_write(ctx, dtype, pages, bounds, batch);
    std::vector<float> sinks(heads);
    for (float &sink : sinks) sink = normal();
    expect(phloem_check_batch(&pages.kv, &batch, window, 1 << 20) == 0, phloem_last_error());
    Array q(dtype, (size_t)n * heads * dim), out(dtype, (size_t)n * heads * dim);
    std::vector<float> lse((size_t)n * heads);
    phloem_attention_args args{q.data(), out.data(), lse.data(), form.sinks ? sinks.data() : nullptr,
                               heads * dim, heads * dim, dtype, dtype, heads, window,
                               1.0f / std::sqrt((float)dim), form.softcap};
    expect(phloem_attention(ctx, &args, &pages.kv, &batch) == 0, phloem_last_error());
    for (int r = 0, token = 0; r < (int)contexts.size(); ++r)
        for (int t = 0; t < counts[r]; ++t, ++token)
            for (int h = 0; h < heads; ++h) {
                const int pos = positions[token], kvh = h / (heads / kv_heads);
                const int low = bounds.low(r, pos, window);
                const size_t at = ((size_t)token * heads + h) * dim;
                std::vector<double> sum(dim);
                double total = form.sinks ? std::exp(sinks[h]) : 0;
                for (int p = low; p <= pos; ++p) {
                    double score = 0;
                    for (int i = 0; i < dim; ++i)
                        score += (double)q.at(at + i) * pages.pool.at(pages.index(r, p, kvh, 0, i));
                    score /= std::sqrt((double)dim);
                    if (form.softcap > 0) score = form.softcap * std::tanh(score / form.softcap);
                    const double e = std::exp(score);
                    total += e;
                    for (int i = 0; i < dim; ++i)
                        sum[i] += e * pages.pool.at(pages.index(r, p, kvh, 1, i));
                }
                for (int i = 0; i < dim; ++i)
                    close_to(out.at(at + i), sum[i] / total, tolerance(dtype), "attention");
                close_to(lse[(size_t)token * heads + h], std::log(total), tolerance(dtype), "lse");
            }
}

double power(int exponent) { return std::ldexp(1.0, exponent); }

// Number i of a packed row of n, from the definition of its format.
double unpacked(int32_t rows, const uint8_t *row, int n, int i) {
    if (rows == PHLOEM_KV_FP4) {
        const double numbers[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
        const int code = row[i / 2] >> (i % 2 * 4) & 15, scale = row[n / 2 + i / 16];
        const double factor = scale < 8 ? (scale & 7) * power(-17)
                                        : (1 + (scale & 7) / 8.0) * power((scale >> 3) - 15);
        return (code & 8 ? -1 : 1) * numbers[code & 7] * factor;
    }
    const double scale = from_bf16((uint16_t)(row[n] | row[n + 1] << 8));
    if (rows == PHLOEM_KV_INT8) return (int8_t)row[i] * scale;
    const int exponent = row[i] >> 3 & 15, mantissa = row[i] & 7;
    const double size = exponent ? (1 + mantissa / 8.0) * power(exponent - 7)
                                 : mantissa / 8.0 * power(-6);
    return (row[i] & 0x80 ? -size : size) * scale;
}

// A latent has one row of two parts, else K and V have one of `dim` each; unread bytes are NaN.
struct PackedCase {
    int32_t rows;
    int heads, kv_heads, dim, tail;
};

void check_packed(phloem_ctx *ctx, const PackedCase &c, int page_size, int window) {
    const bool latent = c.tail > 0;
    const int lead = c.dim - c.tail, sides = latent ? 1 : 2, last = 200, count = 30;
    const auto part_bytes = [&](int n) { return c.rows == PHLOEM_KV_FP4 ? n / 2 + n / 16 : n + 2; };
    const int row_bytes = part_bytes(lead) + (latent ? part_bytes(c.tail) : 0);
    const int pages = (last + page_size - 1) / page_size;
    std::vector<uint8_t> pool((size_t)pages * sides * page_size * c.kv_heads * row_bytes, 0xff);
    phloem_kv_layer kv{};
    kv.base = pool.data();
    kv.head_stride = row_bytes;
    kv.token_stride = (int64_t)c.kv_heads * row_bytes;
    kv.kv_stride = latent ? 0 : page_size * kv.token_stride;
    kv.page_stride = kv.group_stride = sides * page_size * kv.token_stride;
    kv.num_pages = pages;
    kv.heads_per_group = kv.num_kv_heads = c.kv_heads;
    kv.page_size = page_size;
    kv.head_dim = c.dim;
    kv.dtype = c.rows;
    kv.value_dim = lead;
    kv.tail_dim = c.tail;
    std::vector<int64_t> table(pages);
    for (int p = 0; p < pages; ++p) table[p] = pages - 1 - p;
    const int first = window > 0 ? last - count - window + 1 : 0;
    std::vector<int32_t> positions, starts{0, last - first};
    for (int p = first; p < last; ++p) positions.push_back(p);
    const int n = (int)positions.size(), width = c.kv_heads * c.dim;
    Array k(PHLOEM_F32, (size_t)n * width), v = k;
    phloem_rope_args rope{};
    rope.k = k.data();
    rope.v = latent ? nullptr : v.data();
    rope.k_stride = rope.v_stride = width;
    phloem_batch batch{starts.data(), positions.data(), table.data(), nullptr, nullptr, nullptr,
                       pages, 1, n};
    expect(phloem_rope_kv_write(ctx, &rope, &kv, &batch) == 0, phloem_last_error());
    for (int tokens : {1, count}) {
        Array q(PHLOEM_F32, (size_t)tokens * c.heads * c.dim);
        Array out(PHLOEM_F32, (size_t)tokens * c.heads * lead);
        phloem_attention_args args{q.data(), out.data(), nullptr, nullptr, c.heads * c.dim,
                                   c.heads * lead, PHLOEM_F32, PHLOEM_F32, c.heads, window, 0.2f, 0};
        starts = {0, tokens};
        batch.positions = positions.data() + n - tokens;
        batch.num_tokens = tokens;
        expect(phloem_attention(ctx, &args, &kv, &batch) == 0, phloem_last_error());
        for (int t = 0; t < tokens; t += 7)
            for (int h = 0; h < c.heads; ++h) {
                const int pos = last - tokens + t, kvh = h / (c.heads / c.kv_heads);
                std::vector<double> sum(lead);
                double total = 0;
                for (int p = window > 0 ? pos - window + 1 : 0; p <= pos; ++p) {
                    const uint8_t *row = pool.data() + table[p / page_size] * kv.page_stride +
                                         p % page_size * kv.token_stride + kvh * row_bytes;
                    const uint8_t *value = row + kv.kv_stride;
                    double score = 0;
                    for (int i = 0; i < c.dim; ++i)
                        score += (double)q.at(((size_t)t * c.heads + h) * c.dim + i) *
                                 (i < lead ? unpacked(c.rows, row, lead, i)
                                           : unpacked(c.rows, row + part_bytes(lead), c.tail, i - lead));
                    const double e = std::exp(0.2 * score);
                    total += e;
                    for (int i = 0; i < lead; ++i) sum[i] += e * unpacked(c.rows, value, lead, i);
                }
                for (int i = 0; i < lead; ++i)
                    close_to(out.at(((size_t)t * c.heads + h) * lead + i), sum[i] / total, 1e-4,
                             "attention over packed rows");
            }
    }
}

// Each head's own matrix; all buffers end with the last head's last number.
void check_heads(phloem_ctx *ctx, int32_t format, int m, int heads, int n, int k) {
    const int64_t bytes = phloem_packed_bytes(format, n, k);
    std::vector<char> packed(heads * bytes);
    Array w(format == PHLOEM_W_BF16 ? PHLOEM_BF16 : PHLOEM_F32, (size_t)heads * n * k);
    for (int h = 0; h < heads; ++h)
        expect(phloem_pack_weight(format, (char *)w.data() + (size_t)h * n * k *
                                  (w.dtype == PHLOEM_F32 ? 4 : 2), w.dtype, n, k, k,
                                  packed.data() + h * bytes) == 0, "pack a head");
    Array x(PHLOEM_F32, (size_t)m * heads * k), y(PHLOEM_F32, (size_t)m * heads * n);
    phloem_weight weight{packed.data(), nullptr, n, k, format, 0};
    phloem_heads_args args{x.f.data(), y.f.data(), &weight, bytes, m, heads * k, k, heads * n, n,
                           heads, 0};
    expect(phloem_heads_gemm(ctx, &args) == 0, phloem_last_error());
    for (int i = 0; i < m; i += 3)
        for (int h = 0; h < heads; ++h)
            for (int j = 0; j < n; ++j) {
                double sum = 0;
                for (int t = 0; t < k; ++t)
                    sum += (double)x.at(((size_t)i * heads + h) * k + t) *
                           w.at(((size_t)h * n + j) * k + t);
                close_to(y.at(((size_t)i * heads + h) * n + j), sum, 1e-4, "heads");
            }
    args.num_heads = 0;
    expect(phloem_heads_gemm(ctx, &args) != 0, "no heads are refused");
}

// Rows with norms of one and angles of nothing: what is written is known; some are not written.
void check_latent_write(phloem_ctx *ctx, int tokens, int lead, int tail, int heads, int q_dim) {
    const int dim = lead + tail, page_size = 4, pages = (tokens + page_size - 1) / page_size;
    Array pool(PHLOEM_F32, (size_t)pages * page_size * dim, true);
    Array rows(PHLOEM_F32, (size_t)tokens * dim), q(PHLOEM_F32, (size_t)tokens * heads * q_dim);
    const Array asked = q;
    std::vector<float> norm(lead, 1.0f), cos((size_t)tokens * tail / 2, 0.0f);
    std::vector<float> sin((size_t)tokens * tail / 2, 1.0f);
    std::vector<uint8_t> kept(tokens);
    std::vector<int64_t> table(pages);
    std::vector<int32_t> starts{0, tokens}, positions(tokens);
    for (int p = 0; p < pages; ++p) table[p] = pages - 1 - p;
    for (int t = 0; t < tokens; ++t) positions[t] = t, kept[t] = t % 3 != 1;
    phloem_kv_layer kv{pool.data(), page_size * dim, page_size * dim, 0, dim, dim, pages, 1,
                       page_size, 1, dim, PHLOEM_F32, lead, tail, 0};
    phloem_batch batch{starts.data(), positions.data(), table.data(), nullptr, nullptr, nullptr,
                       pages, 1, tokens};
    phloem_latent_args args{q.f.data(), rows.f.data(), cos.data(), sin.data(), norm.data(),
                            heads * q_dim, dim, tokens, kept.data(), heads, q_dim, tail, 1e-6f};
    expect(phloem_latent_write(ctx, &args, &kv, &batch) == 0, phloem_last_error());
    for (int t = 0; t < tokens; ++t) {
        const size_t at = ((size_t)table[t / page_size] * page_size + t % page_size) * dim;
        double square = 0;
        for (int i = 0; i < lead; ++i) square += (double)rows.at(t * dim + i) * rows.at(t * dim + i);
        for (int i = 0; i < dim; ++i) {
            if (!kept[t]) {
                expect(std::isnan(pool.at(at + i)), "another rank's row is written");
                continue;
            }
            const int turned = i - lead, half = tail / 2;  // a quarter of a turn
            const double want = i < lead ? rows.at(t * dim + i) / std::sqrt(square / lead + 1e-6)
                                : turned < half ? -rows.at(t * dim + i + half)
                                                : rows.at(t * dim + i - half);
            close_to(pool.at(at + i), want, 1e-5, "a latent");
        }
        for (int h = 0; h < heads; ++h)
            for (int i = 0; i < q_dim - tail; ++i) {
                const size_t plain = ((size_t)t * heads + h) * q_dim + i;
                expect(q.at(plain) == asked.at(plain), "a query is rotated at its end only");
            }
    }
    args.rotary_dim = tail + 2;
    expect(phloem_latent_write(ctx, &args, &kv, &batch) != 0, "another rotary part is refused");
}

// Shapes that must fit, odd ones included; values are checked against other calls in Python.
void check_layer(phloem_ctx *ctx, int32_t dtype, int tokens, bool gemma) {
    const int hidden = 40, heads = 4, kv_heads = 2, dim = 12, inner = 32;
    Pages pages(dtype, kv_heads, 2, 4, dim, {tokens});
    std::vector<float> norm(hidden, 1.0f), head_norm(dim, 1.0f), angles(64 * dim / 2, 0.5f);
    std::vector<std::vector<char>> packed;
    auto weight = [&](int n, int k, bool gate_up) {
        Array w(PHLOEM_F32, (size_t)n * k);
        packed.emplace_back(phloem_packed_bytes(PHLOEM_W_BF16, n, k));
        const float *half = w.f.data() + (size_t)n / 2 * k;
        const int code = gate_up ? phloem_pack_gate_up(PHLOEM_W_BF16, w.data(), half, PHLOEM_F32,
                                                       n / 2, k, k, packed.back().data())
                                 : phloem_pack_weight(PHLOEM_W_BF16, w.data(), PHLOEM_F32, n, k, k,
                                                      packed.back().data());
        expect(code == 0, "pack");
        return phloem_weight{packed.back().data(), nullptr, n, k, PHLOEM_W_BF16, 0};
    };
    packed.reserve(4);
    phloem_layer layer{};
    layer.attn_norm = layer.mlp_norm = norm.data();
    layer.q_norm = layer.k_norm = head_norm.data();
    layer.cos = layer.sin = angles.data();
    layer.qkv = weight((heads + 2 * kv_heads) * dim, hidden, false);
    layer.o = weight(hidden, heads * dim, false);
    layer.gate_up = weight(2 * inner, hidden, true);
    layer.down = weight(hidden, inner, false);
    layer.max_position = 64;
    layer.hidden = hidden;
    layer.num_heads = heads;
    layer.rotary_dim = dim;
    layer.norm_eps = 1e-5f;
    layer.scale = 0.3f;
    layer.gate = gemma ? PHLOEM_GATE_GELU_TANH : PHLOEM_GATE_SILU;
    if (gemma) {
        layer.post_attn_norm = layer.post_mlp_norm = norm.data();
        layer.softcap = 2.0f;
        layer.window = 7;
    }
    std::vector<int32_t> starts{0, tokens}, positions;
    for (int i = 0; i < tokens; ++i) positions.push_back(i);
    phloem_batch batch{starts.data(), positions.data(), pages.tables.data(), nullptr, nullptr,
                       nullptr, pages.width, 1, tokens};
    Array x(dtype, (size_t)tokens * hidden);
    expect(phloem_layer_forward(ctx, &layer, &pages.kv, &batch, x.data(), dtype) == 0,
           phloem_last_error());
    for (int i = 0; i < tokens * hidden; ++i) expect(std::isfinite(x.at(i)), "layer is finite");
    positions.back() = 64;
    expect(phloem_layer_forward(ctx, &layer, &pages.kv, &batch, x.data(), dtype) != 0,
           "a position beyond the tables is refused");
}

void check_small(phloem_ctx *ctx, int32_t dtype, int n) {
    Array x(dtype, 3 * n), y(dtype, 3 * n), residual(dtype, 3 * n);
    std::vector<float> w(n, 1.0f), values(n);
    std::vector<int64_t> indices(n), best(3);
    expect(phloem_rmsnorm(ctx, x.data(), residual.data(), w.data(), y.data(), dtype, 3, n, 1e-5f) == 0,
           "rmsnorm");
    expect(phloem_silu_mul(ctx, x.data(), y.data(), residual.data(), dtype, 3, n, n) == 0, "silu");
    expect(phloem_argmax(ctx, x.data(), dtype, 3, n, n, best.data()) == 0, "argmax");
    float lse;
    expect(phloem_top_k(ctx, x.data(), dtype, n, (n + 1) / 2, values.data(), indices.data(), &lse) == 0,
           "top_k");
    expect(values[0] == x.at(best[0]), "top_k begins with the greatest");
    for (int i = 1; i < (n + 1) / 2; ++i) expect(values[i] <= values[i - 1], "top_k falls");
    std::vector<int32_t> ids{2, 0};
    Array out(PHLOEM_F32, 2 * n);
    std::vector<char> packed(phloem_packed_bytes(dtype, 3, n));  // formats and dtypes agree
    expect(phloem_pack_weight(dtype, x.data(), dtype, 3, n, n, packed.data()) == 0, "pack");
    phloem_weight table{packed.data(), nullptr, 3, n, dtype, 0};
    expect(phloem_embedding(ctx, ids.data(), &table, out.data(), PHLOEM_F32, 2) == 0, "embedding");
    expect(out.at(0) == x.at(2 * n), "embedding row");
    ids[0] = 3;
    expect(phloem_embedding(ctx, ids.data(), &table, out.data(), PHLOEM_F32, 2) != 0,
           "an id outside the table is refused");
    std::vector<int64_t> from{2, 0}, to{0, 1};
    expect(phloem_copy_pages(ctx, y.data(), x.data(), to.data(), from.data(), 2,
                             n * (dtype == PHLOEM_F32 ? 4 : 2)) == 0, "copy");
    expect(y.at(0) == x.at(2 * n) && y.at(n) == x.at(0), "copied pages");
}

}  // namespace

int main() {
    for (int32_t isa = 0; isa < PHLOEM_NUM_ISAS; ++isa) {
        if (!phloem_isa_supported(isa)) continue;
        for (int threads = 1; threads <= 3; ++threads) {
            phloem_ctx *ctx = phloem_ctx_create(isa, threads);
            if (!ctx) return printf("%s\n", phloem_last_error()), 1;
            for (int32_t dtype : {PHLOEM_F32, PHLOEM_BF16}) {
                for (int m : {1, 2, 5, 9, 33})
                    for (int32_t format : {PHLOEM_W_F32, PHLOEM_W_BF16, PHLOEM_W_Q8_0})
                        check_gemm(ctx, format, dtype, m, uniform(1, 70), uniform(1, 90));
                check_gemm(ctx, PHLOEM_W_BF16, dtype, 300, 20, 33);
                for (int page_size : {1, 4, 16, 64}) {
                    check_attention(ctx, dtype, 6, 2, 2, page_size, 64, 0);
                    check_attention(ctx, dtype, 8, 4, 2, page_size, 16, page_size == 4 ? 20 : 0);
                    check_attention(ctx, dtype, 5, 1, 1, page_size, 20, page_size == 16 ? 7 : 0);
                    for (int window : {1, 9, 100}) {
                        check_attention(ctx, dtype, 6, 2, 1, page_size, 32, window, {true, 0, true});
                        check_attention(ctx, dtype, 3, 3, 3, page_size, 12, window, {true, 1.5f, false});
                    }
                }
                for (int tokens : {1, 3, 50})
                    for (bool gemma : {false, true}) check_layer(ctx, dtype, tokens, gemma);
                for (int n : {1, 7, 16, 65}) check_small(ctx, dtype, n);
            }
            for (int32_t format : {PHLOEM_W_F32, PHLOEM_W_BF16})
                for (int m : {1, 7, 300}) check_heads(ctx, format, m, 3, 20, 33);
            for (int tokens : {1, 13}) check_latent_write(ctx, tokens, 20, 6, 3, 14);
            for (int32_t rows : {PHLOEM_KV_INT8, PHLOEM_KV_FP8, PHLOEM_KV_FP4})
                for (int page_size : {1, 16})
                    for (int window : {0, 50}) {
                        check_packed(ctx, {rows, 6, 2, 64, 0}, page_size, window);
                        check_packed(ctx, {rows, 5, 1, 16, 0}, page_size, window);
                        check_packed(ctx, {rows, 4, 1, 80, 16}, page_size, window);
                        check_packed(ctx, {rows, 16, 1, 48, 16}, page_size, window);
                        if (rows != PHLOEM_KV_FP4)
                            check_packed(ctx, {rows, 2, 1, 22, 0}, page_size, window);
                    }
            for (int32_t format : {PHLOEM_W_Q4_0, PHLOEM_W_Q4_1, PHLOEM_W_Q8_0})
                for (int m : {1, 2, 3, 20, 270}) check_blocks(ctx, format, m, uniform(1, 40), 96);
#if defined(PHLOEM_EMULATE)
            if (rounds(ctx)) check_orders(ctx);
#endif
            phloem_ctx_destroy(ctx);
        }
        printf("isa %d: checked\n", isa);
    }
    expect(phloem_ctx_create(0, 0) == nullptr, "no threads is refused");
    expect(phloem_gemm(nullptr, nullptr) != 0, "null is refused");
    printf(failures ? "%d failures\n" : "all right\n", failures);
    return failures != 0;
}
