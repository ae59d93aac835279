/* The C ABI of Phloem's native CPU kernels: what ctypes binds. No torch, no C++ types.
 *
 * Every pointer is borrowed for the call. Strides are in elements. A context owns the threads and
 * the workspace; one call at a time per context. Functions return 0, or a negative PHLOEM_E_* code
 * (phloem_last_error has the text).
 */
#ifndef PHLOEM_CPU_H
#define PHLOEM_CPU_H
#include <stdint.h>

#if defined(__GNUC__)
#define PHLOEM_API __attribute__((visibility("default")))
#else
#define PHLOEM_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define PHLOEM_ABI_VERSION 7

enum {
    PHLOEM_OK = 0,
    PHLOEM_E_ARG = -1,
    PHLOEM_E_MEMORY = -2,
    PHLOEM_E_ISA = -3,
    PHLOEM_E_WRONG = -4
};
enum { PHLOEM_F32 = 0, PHLOEM_BF16 = 1 };
/* What rows of pages may be beside those: bytes, codes with scales (cpu/codec.h). */
enum { PHLOEM_KV_INT8 = 2, PHLOEM_KV_FP8 = 3, PHLOEM_KV_FP4 = 4 };
/* Weight formats. The Q formats are GGUF's: blocks of 32 weights along k with fp16 scales. */
enum {
    PHLOEM_W_F32 = 0,
    PHLOEM_W_BF16 = 1,
    PHLOEM_W_Q8_0 = 2,
    PHLOEM_W_Q4_0 = 3,
    PHLOEM_W_Q4_1 = 4,
    PHLOEM_NUM_W = 5
};
/* What a weight of gate and up panels in turn does to its gate; NONE: it is an ordinary weight. */
enum { PHLOEM_GATE_NONE = 0, PHLOEM_GATE_SILU = 1, PHLOEM_GATE_GELU_TANH = 2 };
/* AVX512BF16 and AMX multiply bf16 weights by activations rounded to bf16; all else as AVX512. */
enum {
    PHLOEM_ISA_PLAIN = 0,
    PHLOEM_ISA_AVX2 = 1,
    PHLOEM_ISA_AVX512 = 2,
    PHLOEM_ISA_AVX512BF16 = 3,
    PHLOEM_ISA_AMX = 4,
    PHLOEM_NUM_ISAS = 5
};

typedef struct phloem_ctx phloem_ctx;

/* A weight matrix W (n, k) for y = x W^T. */
typedef struct {
    const void *data;  /* packed panels */
    const float *bias; /* (n), or NULL */
    int64_t n, k;
    int32_t format;
    int32_t reserved;
} phloem_weight;

/* y (m, n) = x W^T [+ bias] [+ residual]; with a `gate` W holds gate and up panels in turn
 * (phloem_pack_gate_up) and y (m, n/2) = act(gate) * up. residual may be y itself. */
typedef struct {
    const void *x;
    void *y;
    const void *residual;
    const phloem_weight *w;
    int64_t m, x_stride, y_stride, residual_stride;
    int32_t x_dtype, y_dtype, residual_dtype, gate;
} phloem_gemm_args;

/* One layer's K and V inside a page pool
 * [page][head_group][layer][kv][token][head][dim]; `base` points at page 0, group 0, this layer, K.
 * Strides are in items: numbers, or bytes of packed rows. Latents have a kv_stride of 0: values are
 * the first value_dim numbers of the rows of K, whose last tail_dim are the rotary part, with
 * scales of their own if they are packed. */
typedef struct {
    void *base;
    int64_t page_stride, group_stride, kv_stride, token_stride, head_stride;
    int64_t num_pages;
    int32_t heads_per_group, page_size, num_kv_heads, head_dim, dtype;
    int32_t value_dim, tail_dim, reserved; /* value_dim 0: head_dim */
} phloem_kv_layer;

/* A ragged batch: row r owns tokens row_start[r] ... row_start[r+1]-1 of the step; `positions` are
 * absolute and never fall within a row, with gaps where other ranks compute; token at position p
 * reads positions read_from[r] ... p (the last `window` of them if window > 0). `tables`: slots of
 * a row's pages from page base[r] on, table_stride apart; those of positions that are not read may
 * be anything. K and V of positions below write_from[r] are in the pages already and are not
 * written. */
typedef struct {
    const int32_t *row_start; /* (num_rows + 1) */
    const int32_t *positions; /* (num_tokens) */
    const int64_t *tables;    /* (num_rows, table_stride) */
    const int32_t *base, *read_from, *write_from; /* (num_rows), or NULL: zeros */
    int64_t table_stride;
    int32_t num_rows, num_tokens;
} phloem_batch;

typedef struct {
    const void *q; /* (num_tokens, num_heads, head_dim) */
    void *out;     /* (.., value_dim); may be q itself when dtypes and sizes are equal */
    float *lse;    /* (num_tokens, num_heads) natural log, or NULL */
    const float *sinks; /* (num_heads) logits that only take part in the sum, or NULL */
    int64_t q_stride, out_stride;
    int32_t q_dtype, out_dtype, num_heads, window;
    float scale;
    float softcap; /* a score s becomes softcap * tanh(s / softcap); 0: it stays */
} phloem_attention_args;

/* Rotary embedding (rotate-half form) and the write of K and V into their pages. rotary_dim 0: no
 * rotation (cos and sin may be NULL); num_heads 0: no queries. */
typedef struct {
    void *q; /* rotated in place */
    const void *k, *v;
    const float *cos, *sin;       /* (max_position, rotary_dim / 2) */
    const float *q_norm, *k_norm; /* (head_dim) per-head RMSNorm before RoPE, or NULL */
    int64_t q_stride, k_stride, v_stride, max_position;
    int32_t dtype, num_heads, rotary_dim;
    float norm_eps;
} phloem_rope_args;

/* Each head its own matrix: y[i][h] (n) = W_h x[i][h] (k); x and y are fp32. Heads of x and y are
 * x_head and y_head floats apart (x_head 0: all have the same x), their packed matrices
 * w_head_bytes. A bias is not added. */
typedef struct {
    const float *x;
    float *y;
    const phloem_weight *w; /* the first head's */
    int64_t w_head_bytes, m, x_stride, x_head, y_stride, y_head;
    int32_t num_heads, reserved;
} phloem_heads_args;

/* What latent attention keeps of a token: rows (num_tokens, head_dim of the pool) fp32, whose lead
 * is normalised and whose last rotary_dim numbers are rotated, are written to their pages (whose
 * tail that is); the last rotary_dim of each head of q (.., num_heads, q_dim) are rotated in
 * place. */
typedef struct {
    float *q;
    const float *rows;
    const float *cos, *sin; /* (max_position, rotary_dim / 2) */
    const float *norm;      /* (head_dim - rotary_dim) */
    int64_t q_stride, rows_stride, max_position;
    const uint8_t *kept; /* (num_tokens): 0 where another rank writes the row; NULL: all are */
    int32_t num_heads, q_dim, rotary_dim;
    float norm_eps;
} phloem_latent_args;

/* One decoder layer: attention and gated MLP, each behind a norm. With post norms, what they give
 * is normalised before it is added to hidden. */
typedef struct {
    const float *attn_norm, *mlp_norm;           /* (hidden) */
    const float *post_attn_norm, *post_mlp_norm; /* (hidden) or NULL */
    const float *q_norm, *k_norm;                /* (head_dim) or NULL */
    const float *cos, *sin, *sinks;
    phloem_weight qkv, o, gate_up, down;
    int64_t max_position;
    int32_t hidden, num_heads, rotary_dim, window;
    float norm_eps, scale, softcap;
    int32_t gate; /* of the MLP: not NONE */
} phloem_layer;

typedef struct {
    const phloem_layer *layer;
    const phloem_kv_layer *kv;
    int32_t component;
    int32_t reserved;
} phloem_layer_step;

PHLOEM_API int32_t phloem_abi_version(void);
PHLOEM_API const char *phloem_last_error(void);
/* The best ISA of this processor among those proven by tests on real machines. */
PHLOEM_API int32_t phloem_best_isa(void);
/* Compiled in, and this processor has it. The system may still refuse AMX to this process:
 * phloem_ctx_create asks, once, and fails with PHLOEM_E_ISA. */
PHLOEM_API int32_t phloem_isa_supported(int32_t isa);
/* A fixed set of products, layers, packed pages and samplings on `isa` against PLAIN. 0, or
 * PHLOEM_E_WRONG and the case that differs in phloem_last_error, or PHLOEM_E_ISA. May die of an
 * illegal instruction: run it in a process that may. */
PHLOEM_API int32_t phloem_self_test(int32_t isa);

PHLOEM_API phloem_ctx *phloem_ctx_create(int32_t isa, int32_t num_threads);
PHLOEM_API void phloem_ctx_destroy(phloem_ctx *ctx);
PHLOEM_API int32_t phloem_ctx_num_threads(const phloem_ctx *ctx);
PHLOEM_API int32_t phloem_ctx_isa(const phloem_ctx *ctx);
PHLOEM_API int64_t phloem_ctx_workspace_bytes(const phloem_ctx *ctx);
/* Growths of the workspace since creation: constant in steady state. */
PHLOEM_API int64_t phloem_ctx_workspace_grows(const phloem_ctx *ctx);

PHLOEM_API int64_t phloem_packed_bytes(int32_t format, int64_t n, int64_t k);
/* Pack W (n, k), row stride `w_stride`, of dtype F32 or BF16, as F32, BF16 or Q8_0. */
PHLOEM_API int32_t phloem_pack_weight(int32_t format, const void *w, int32_t w_dtype, int64_t n,
                                      int64_t k, int64_t w_stride, void *out);
/* Pack gate and up (each (n, k)) in turn, 16 columns each, as one weight of 2n columns.
 * n must be a multiple of 16. */
PHLOEM_API int32_t phloem_pack_gate_up(int32_t format, const void *gate, const void *up,
                                       int32_t w_dtype, int64_t n, int64_t k, int64_t w_stride,
                                       void *out);
/* Pack rows of GGUF blocks (n rows of k weights, k a multiple of 32): the same bits in the order
 * of panels. */
PHLOEM_API int32_t phloem_pack_blocks(int32_t format, const void *rows, int64_t n, int64_t k,
                                      void *out);

PHLOEM_API int32_t phloem_gemm(phloem_ctx *ctx, const phloem_gemm_args *args);
/* y = x / rms(x) * w; with `residual` (m, d): residual += x first, and residual is normalised. */
PHLOEM_API int32_t phloem_rmsnorm(phloem_ctx *ctx, const void *x, void *residual, const float *w,
                                  void *y, int32_t dtype, int64_t m, int64_t d, float eps);
/* y (m, d) = silu(gate) * up. */
PHLOEM_API int32_t phloem_silu_mul(phloem_ctx *ctx, const void *gate, const void *up, void *y,
                                   int32_t dtype, int64_t m, int64_t d, int64_t in_stride);
/* y (m, k) = rows `ids` of a packed table (n, k), in y's dtype. */
PHLOEM_API int32_t phloem_embedding(phloem_ctx *ctx, const int32_t *ids,
                                    const phloem_weight *table, void *y, int32_t y_dtype,
                                    int64_t m);
/* Every slot that the batch can touch in layers with this window (0: without one) lies in the pool:
 * once per step, the calls below trust it. */
PHLOEM_API int32_t phloem_check_batch(const phloem_kv_layer *kv, const phloem_batch *batch,
                                      int32_t window, int64_t max_position);
PHLOEM_API int32_t phloem_rope_kv_write(phloem_ctx *ctx, const phloem_rope_args *args,
                                        const phloem_kv_layer *kv, const phloem_batch *batch);
PHLOEM_API int32_t phloem_heads_gemm(phloem_ctx *ctx, const phloem_heads_args *args);
PHLOEM_API int32_t phloem_latent_write(phloem_ctx *ctx, const phloem_latent_args *args,
                                       const phloem_kv_layer *kv, const phloem_batch *batch);
PHLOEM_API int32_t phloem_attention(phloem_ctx *ctx, const phloem_attention_args *args,
                                    const phloem_kv_layer *kv, const phloem_batch *batch);
/* hidden (num_tokens, hidden) in place. */
PHLOEM_API int32_t phloem_layer_forward(phloem_ctx *ctx, const phloem_layer *layer,
                                        const phloem_kv_layer *kv, const phloem_batch *batch,
                                        void *hidden, int32_t dtype);
/* Several layers, one after the other; each reads the batch of its component. */
PHLOEM_API int32_t phloem_layers_forward(phloem_ctx *ctx, const phloem_layer_step *steps,
                                         int32_t num_steps, const phloem_batch *const *batches,
                                         int32_t num_batches, void *hidden, int32_t dtype);
/* One layer in two calls, for who must know that K and V are written before any are read: up to
 * their write, and from attention on. qkv (num_tokens, (num_heads + 2 num_kv_heads) head_dim) is
 * the caller's, written by the first call, read and overwritten by the second one. */
PHLOEM_API int32_t phloem_layer_project(phloem_ctx *ctx, const phloem_layer *layer,
                                        const phloem_kv_layer *kv, const phloem_batch *batch,
                                        void *hidden, int32_t dtype, float *qkv);
PHLOEM_API int32_t phloem_layer_finish(phloem_ctx *ctx, const phloem_layer *layer,
                                       const phloem_kv_layer *kv, const phloem_batch *batch,
                                       void *hidden, int32_t dtype, float *qkv);
/* The second one without attention, whose result is in the place of q. */
PHLOEM_API int32_t phloem_layer_output(phloem_ctx *ctx, const phloem_layer *layer,
                                       const phloem_kv_layer *kv, const phloem_batch *batch,
                                       void *hidden, int32_t dtype, float *qkv);
/* First index of the greatest logit of each row (m, n); -1 if one of them is not finite. */
PHLOEM_API int32_t phloem_argmax(phloem_ctx *ctx, const void *x, int32_t dtype, int64_t m,
                                 int64_t n, int64_t stride, int64_t *out);
/* The k greatest of one row in descending order (ties: lower index first), and the natural
 * log-sum-exp of the row. */
PHLOEM_API int32_t phloem_top_k(phloem_ctx *ctx, const void *x, int32_t dtype, int64_t n,
                                int64_t k, float *values, int64_t *indices, float *lse);
/* Copy pages (bytes each) past the caches; src and dst are byte addresses of pools. */
PHLOEM_API int32_t phloem_copy_pages(phloem_ctx *ctx, void *dst, const void *src,
                                     const int64_t *dst_slots, const int64_t *src_slots,
                                     int64_t num_pages, int64_t page_bytes);

/* The same run of bytes in each head group of a page: `num_segments` runs of `segment_bytes`, the
 * first at `offset` in the page, the others `segment_stride` apart. */
typedef struct {
    int64_t num_pages, page_bytes, num_segments, segment_stride, offset, segment_bytes;
} phloem_segments;
/* Copy such parts of pages on the calling thread; needs no context. */
PHLOEM_API int32_t phloem_copy_segments(void *dst, const void *src, const int64_t *dst_slots,
                                        const int64_t *src_slots, const phloem_segments *segments);

#ifdef __cplusplus
}
#endif
#endif
