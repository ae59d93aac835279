// Packing: weight matrices, as floats or as rows of GGUF blocks, into panels of 16 columns.
#include <algorithm>
#include <cstring>

#include "context.h"

namespace phloem {
namespace {

uint16_t round_bf16(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40u);
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// x >= 0, to nearest even; what is too large becomes the greatest half.
uint16_t round_half(float x) {
    if (!(x < 65504.0f)) return 0x7bff;
    if (x < 6.103515625e-05f) {  // subnormal: steps of 2^-24, which adding 0.5 rounds to
        const float shifted = x + 0.5f;
        uint32_t u;
        memcpy(&u, &shifted, 4);
        return (uint16_t)(u - 0x3f000000u);
    }
    uint32_t u;
    memcpy(&u, &x, 4);
    u += 0xfffu + ((u >> 13) & 1u);
    return (uint16_t)((u - (112u << 23)) >> 13);
}

struct Source {
    const void *data;
    int32_t dtype;
    int64_t stride;

    float at(int64_t row, int64_t column) const {
        const int64_t i = row * stride + column;
        if (dtype == PHLOEM_F32) return ((const float *)data)[i];
        const uint32_t u = (uint32_t)((const uint16_t *)data)[i] << 16;
        float x;
        memcpy(&x, &u, 4);
        return x;
    }
};

void pack_float_row(int32_t format, const Source &source, int64_t row, int64_t k, int64_t c,
                    void *panel) {
    for (int64_t i = 0; i < k; ++i) {
        const float x = source.at(row, i);
        if (format == PHLOEM_W_BF16)
            ((uint16_t *)panel)[(i / 2 * kPanelColumns + c) * 2 + i % 2] = round_bf16(x);
        else
            ((float *)panel)[i * kPanelColumns + c] = x;
    }
}

// Where weight i of column c lies behind the scales of a panel's block, see blocks.inl.
void put_byte(uint8_t *data, int64_t c, int i, int8_t q) {
    data[64 * (i / 4) + 4 * c + 2 * (i % 2) + i / 2 % 2] = (uint8_t)q;
}
void put_nibble(uint8_t *data, int64_t c, int i, int q) {
    data[64 * (i / 8) + 4 * c + 2 * (i % 2) + i % 8 / 4] |= (uint8_t)(q << (i / 2 % 2 * 4));
}

// As GGUF's own tools quantise: the greatest of a block becomes 127, halves are rounded away.
void pack_q8_row(const Source &source, int64_t row, int64_t k, int64_t c, uint8_t *panel) {
    for (int64_t low = 0; low < k; low += kBlockWeights, panel += block_bytes(PHLOEM_W_Q8_0)) {
        const int n = (int)std::min(kBlockWeights, k - low);
        float x[kBlockWeights], top = 0.0f;
        for (int i = 0; i < n; ++i) {
            x[i] = source.at(row, low + i);
            top = std::max(top, x[i] < 0 ? -x[i] : x[i]);
        }
        const float scale = top / 127.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
        const uint16_t half = round_half(scale);
        memcpy(panel + 2 * c, &half, 2);
        for (int i = 0; i < n; ++i) {
            const float q = x[i] * inverse;
            put_byte(panel + 32, c, i, (int8_t)(q + (q < 0 ? -0.5f : 0.5f)));
        }
    }
}

// Rows row0 ... row0 + 15 of the source become one panel; rows from n on become zeros.
void pack_panel(int32_t format, const Source &source, int64_t row0, int64_t n, int64_t k,
                void *panel) {
    memset(panel, 0, panel_bytes(format, k));
    for (int64_t c = 0; c < std::min(kPanelColumns, n - row0); ++c) {
        if (is_blocks(format)) pack_q8_row(source, row0 + c, k, c, (uint8_t *)panel);
        else pack_float_row(format, source, row0 + c, k, c, panel);
    }
}

void pack_block_row(int32_t format, const uint8_t *row, int64_t k, int64_t c, uint8_t *panel) {
    const int offsets = format == PHLOEM_W_Q4_1 ? 2 : 0;
    for (int64_t b = 0; b < k / kBlockWeights; ++b, panel += block_bytes(format)) {
        memcpy(panel + 2 * c, row, 2);
        if (offsets) memcpy(panel + 32 + 2 * c, row + 2, 2);
        const uint8_t *from = row + 2 + offsets;
        uint8_t *data = panel + 32 + 16 * offsets;
        if (format == PHLOEM_W_Q8_0) {
            for (int i = 0; i < 32; ++i) put_byte(data, c, i, (int8_t)from[i]);
            row = from + 32;
            continue;
        }
        for (int i = 0; i < 16; ++i) {
            put_nibble(data, c, i, from[i] & 15);
            put_nibble(data, c, i + 16, from[i] >> 4);
        }
        row = from + 16;
    }
}

int32_t check_pack(int32_t format, const void *w, int32_t w_dtype, int64_t n, int64_t k,
                   int64_t w_stride, const void *out) {
    if (!w || !out) return fail(PHLOEM_E_ARG, "pack: null pointer");
    if (n < 1 || k < 1 || w_stride < k)
        return fail(PHLOEM_E_ARG, "pack: shape (%lld, %lld), stride %lld", (long long)n,
                    (long long)k, (long long)w_stride);
    if (format < 0 || format > PHLOEM_W_Q8_0)
        return fail(PHLOEM_E_ARG, "pack: floats do not become format %d", format);
    if (w_dtype != PHLOEM_F32 && w_dtype != PHLOEM_BF16)
        return fail(PHLOEM_E_ARG, "pack: unknown dtype %d", w_dtype);
    return PHLOEM_OK;
}

}  // namespace
}  // namespace phloem

using namespace phloem;

extern "C" {

int64_t phloem_packed_bytes(int32_t format, int64_t n, int64_t k) {
    if (n < 1 || k < 1 || format < 0 || format >= PHLOEM_NUM_W)
        return fail(PHLOEM_E_ARG, "packed_bytes: format %d, shape (%lld, %lld)", format,
                    (long long)n, (long long)k);
    return ceil_div(n, kPanelColumns) * panel_bytes(format, k);
}

int32_t phloem_pack_weight(int32_t format, const void *w, int32_t w_dtype, int64_t n, int64_t k,
                           int64_t w_stride, void *out) {
    if (int32_t code = check_pack(format, w, w_dtype, n, k, w_stride, out)) return code;
    for (int64_t p = 0; p * kPanelColumns < n; ++p)
        pack_panel(format, {w, w_dtype, w_stride}, p * kPanelColumns, n, k,
                   (char *)out + p * panel_bytes(format, k));
    return PHLOEM_OK;
}

int32_t phloem_pack_gate_up(int32_t format, const void *gate, const void *up, int32_t w_dtype,
                            int64_t n, int64_t k, int64_t w_stride, void *out) {
    if (int32_t code = check_pack(format, gate, w_dtype, n, k, w_stride, out)) return code;
    if (!up) return fail(PHLOEM_E_ARG, "pack: null pointer");
    if (n % kPanelColumns)
        return fail(PHLOEM_E_ARG, "pack: %lld gate rows are not a multiple of 16", (long long)n);
    const void *sources[2] = {gate, up};
    for (int64_t p = 0; p < 2 * n / kPanelColumns; ++p)
        pack_panel(format, {sources[p % 2], w_dtype, w_stride}, p / 2 * kPanelColumns, n, k,
                   (char *)out + p * panel_bytes(format, k));
    return PHLOEM_OK;
}

int32_t phloem_pack_blocks(int32_t format, const void *rows, int64_t n, int64_t k, void *out) {
    if (!rows || !out) return fail(PHLOEM_E_ARG, "pack: null pointer");
    if (!is_blocks(format) || format >= PHLOEM_NUM_W || n < 1 || k < 1 || k % kBlockWeights)
        return fail(PHLOEM_E_ARG, "pack_blocks: format %d, shape (%lld, %lld)", format,
                    (long long)n, (long long)k);
    const int64_t columns = format == PHLOEM_W_Q8_0 ? 34 : format == PHLOEM_W_Q4_0 ? 18 : 20;
    const int64_t row_bytes = k / kBlockWeights * columns;
    memset(out, 0, phloem_packed_bytes(format, n, k));
    for (int64_t row = 0; row < n; ++row)
        pack_block_row(format, (const uint8_t *)rows + row * row_bytes, k, row % kPanelColumns,
                       (uint8_t *)out + row / kPanelColumns * panel_bytes(format, k));
    return PHLOEM_OK;
}

}  // extern "C"
