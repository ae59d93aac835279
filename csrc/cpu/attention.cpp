// How attention is cut into tasks.
#include <algorithm>
#include <exception>

#include "attention_amx.h"
#include "codec.h"
#include "context.h"

namespace phloem {
namespace {

// Queries (tokens x heads of a group) of one tile: many, since rows are unpacked once for all of
// them, but so few that each thread has some tiles and that a tile's queries and sums stay in L2.
constexpr int64_t kMostTileRows = 256, kLeastTileRows = 64, kTilesPerThread = 8;
// A tile of AMX passes over K and V so fast that reading them counts: more queries to a tile.
constexpr int64_t kMostAmxRows = 384, kAmxTilesPerThread = 6;
constexpr int64_t kTileCacheBytes = 256 << 10;
constexpr int64_t kPartTokens = 256;  // context of one decode task; cuts lie at multiples of it
constexpr int64_t kTilePartTokens = 288;  // of one that is a tile; whole blocks of tokens

// A decode of so many heads on one is a tile of them: rows are unpacked once, not for three heads.
constexpr int64_t kTileGroup = 12;

class Plan {
public:
    Plan(phloem_ctx &ctx, const AttentionCall &call)
        : ctx_(ctx), call_(call), group_(call.args.num_heads / call.kv.num_kv_heads),
          dim_(value_dim(call.kv)) {
        if (ctx.amx && ctx.amx->fits(call)) amx_ = ctx.amx;
        tile_tokens_ = std::max<int64_t>(1, tile_rows() / group_);
        ctx_.items.clear();
        ctx_.merges.clear();
        const int32_t multiple = ctx.kernels->decode_dim_multiple;
        by_tiles_ = group_ >= kTileGroup || dim_ % multiple || lead_dim(call.kv) % multiple ||
                    call.kv.tail_dim % multiple;
        for (int32_t row = 0; row < call.batch.num_rows; ++row) {
            const int32_t first = call.batch.row_start[row], end = call.batch.row_start[row + 1];
            if (end - first == 1) add_decode(row, first);
            else add_tiles(row, first, end);
        }
    }

    void run() const {
        const int64_t part_floats = group_ * (dim_ + 2);
        float *parts = ctx_.parts.get<float>(num_parts_ * part_floats);
        float *ml = parts + num_parts_ * group_ * dim_;
        const Kernels &kernels = *ctx_.kernels;
        const int64_t scratch_floats =
            ceil_div(std::max(tile_scratch_floats(),
                              kernels.decode_scratch_floats(group_, call_.kv.head_dim)),
                     16) * 16;
        float *scratch = ctx_.scratch.get<float>(scratch_floats * ctx_.pool.size());
        ctx_.pool.run((int64_t)ctx_.items.size(), [&](int64_t i, int thread) {
            const AttentionItem &item = ctx_.items[i];
            float *mine = scratch + thread * scratch_floats;
            float *o = item.part_index < 0 ? nullptr : parts + item.part_index * group_ * dim_;
            float *sums = item.part_index < 0 ? nullptr : ml + item.part_index * group_ * 2;
            if (item.decode) kernels.attention_decode(call_, item.part, after(i), o, sums, mine);
            else tile(item.tile, o, sums, mine);
        });
        // A merge is short: several to a task.
        const int64_t n = (int64_t)ctx_.merges.size(), step = 16;
        ctx_.pool.run(ceil_div(n, step), [&](int64_t i, int) {
            for (int64_t j = i * step; j < std::min(n, (i + 1) * step); ++j) {
                const AttentionMerge &m = ctx_.merges[j];
                kernels.attention_merge(call_, m.token, m.kv_head, m.num_parts,
                                        parts + m.first_part * group_ * dim_,
                                        ml + m.first_part * group_ * 2);
            }
        });
    }

private:
    int64_t tile_scratch_floats() const {
        const auto floats = amx_ ? amx_->scratch_floats : ctx_.kernels->tile_scratch_floats;
        return floats(tile_tokens_, group_, call_.kv);
    }
    void tile(const TileItem &item, float *o, float *ml, float *scratch) const {
        (amx_ ? amx_->tile : ctx_.kernels->attention_tile)(call_, item, o, ml, scratch);
    }

    // The item that the thread of item i takes next if all take equally long.
    const DecodeItem *after(int64_t i) const {
        const size_t next = (size_t)(i + ctx_.pool.size());
        if (next >= ctx_.items.size() || !ctx_.items[next].decode) return nullptr;
        return &ctx_.items[next].part;
    }

    // Whole blocks.
    int64_t part_of_tiles() const { return amx_ ? 2 * amx_->block : kTilePartTokens; }

    int64_t tile_rows() const {
        const int64_t fit = kTileCacheBytes / (4 * (call_.kv.head_dim + dim_));
        const int64_t all = (int64_t)call_.batch.num_tokens * call_.args.num_heads;
        const int64_t tiles = (amx_ ? kAmxTilesPerThread : kTilesPerThread) * ctx_.pool.size();
        const int64_t most = amx_ ? kMostAmxRows : kMostTileRows;
        return std::max(kLeastTileRows, std::min({fit, ceil_div(all, tiles), most}));
    }

    int64_t first_seen_by(int32_t row, int32_t token) const {
        return first_seen(row_bounds(call_.batch, row), call_.args.window,
                          call_.batch.positions[token]);
    }

    // One token: its context is cut in parts, for all threads.
    void add_decode(int32_t row, int32_t token) {
        const int64_t end = (int64_t)call_.batch.positions[token] + 1;
        const int64_t begin = first_seen_by(row, token);
        const int64_t length = by_tiles_ ? part_of_tiles() : kPartTokens;
        for (int32_t head = 0; head < call_.kv.num_kv_heads; ++head) {
            const int64_t first_part = num_parts_;
            for (int64_t t = begin; t < end;) {
                const int64_t stop = std::min(end, (t / length + 1) * length);
                AttentionItem item{};
                item.decode = !by_tiles_;
                if (by_tiles_) item.tile = {row, head, token, token + 1, t, stop};
                else item.part = {row, head, token, t, stop};
                item.part_index = num_parts_++;
                ctx_.items.push_back(item);
                t = stop;
            }
            ctx_.merges.push_back({token, head, first_part, num_parts_ - first_part});
        }
    }

    // From the last tokens down: the longest tasks start first.
    void add_tiles(int32_t row, int32_t first, int32_t end) {
        if (end == first) return;
        const int64_t tiles = ceil_div(end - first, tile_tokens_);
        const int32_t step = (int32_t)ceil_div(end - first, tiles);
        for (int64_t at = first + (ceil_div(end - first, step) - 1) * step; at >= first; at -= step)
            for (int32_t head = 0; head < call_.kv.num_kv_heads; ++head) {
                const int32_t last = std::min(end, (int32_t)at + step);
                AttentionItem item{};
                item.tile = {row, head, (int32_t)at, last, first_seen_by(row, (int32_t)at),
                             (int64_t)call_.batch.positions[last - 1] + 1};
                item.part_index = -1;
                ctx_.items.push_back(item);
            }
    }

    phloem_ctx &ctx_;
    const AttentionCall &call_;
    int64_t group_, dim_, tile_tokens_ = 1, num_parts_ = 0;
    bool by_tiles_ = false;
    const AmxAttention *amx_ = nullptr;  // for tiles, if it fits
};

}  // namespace

void run_attention(phloem_ctx &ctx, const AttentionCall &call) { Plan(ctx, call).run(); }

static int32_t check_kv(const phloem_kv_layer &kv) {
    if (!kv.base || kv.page_size < 1 || kv.num_kv_heads < 1 || kv.head_dim < 1 ||
        kv.heads_per_group < 1 || kv.dtype < 0 || kv.dtype > PHLOEM_KV_FP4)
        return fail(PHLOEM_E_ARG, "kv: null pool, bad size or dtype");
    const int64_t values = value_dim(kv);
    if (kv.tail_dim < 0 || kv.tail_dim >= kv.head_dim || values < 1 ||
        (is_latent(kv) && values > lead_dim(kv)) || (!is_latent(kv) && kv.tail_dim > 0))
        return fail(PHLOEM_E_ARG, "kv: values of %lld and a tail of %d in rows of %d",
                    (long long)values, kv.tail_dim, kv.head_dim);
    if (!is_packed(kv.dtype)) return PHLOEM_OK;
    const int64_t block = kv.dtype == PHLOEM_KV_FP4 ? kFp4Block : 1;
    if (kv.head_dim > kMostRowNumbers || kv.head_dim % block || kv.tail_dim % block ||
        values != lead_dim(kv))
        return fail(PHLOEM_E_ARG, "kv: packed rows of %d numbers, values of %lld", kv.head_dim,
                    (long long)values);
    return PHLOEM_OK;
}

int32_t check_batch(const phloem_kv_layer &kv, const phloem_batch &batch, int32_t window) {
    if (int32_t code = check_kv(kv)) return code;
    if (batch.num_rows < 0 || batch.num_tokens < 0)
        return fail(PHLOEM_E_ARG, "batch: negative size");
    if (batch.num_rows == 0) return PHLOEM_OK;
    if (!batch.row_start || !batch.positions || !batch.tables)
        return fail(PHLOEM_E_ARG, "batch: null pointer");
    if (batch.row_start[0] != 0 || batch.row_start[batch.num_rows] != batch.num_tokens)
        return fail(PHLOEM_E_ARG, "batch: rows do not cover the %d tokens", batch.num_tokens);
    for (int32_t row = 0; row < batch.num_rows; ++row) {
        const int32_t first = batch.row_start[row], end = batch.row_start[row + 1];
        if (end < first) return fail(PHLOEM_E_ARG, "batch: row %d has a negative length", row);
        for (int32_t i = first; i < end; ++i)
            if (batch.positions[i] < 0 || (i > first && batch.positions[i] < batch.positions[i - 1]))
                return fail(PHLOEM_E_ARG, "batch: positions of row %d do not grow", row);
        if (end == first) continue;
        const RowBounds bounds = row_bounds(batch, row);
        if (bounds.base < 0 || bounds.read_from < 0 || bounds.read_from > batch.positions[first])
            return fail(PHLOEM_E_ARG, "batch: row %d reads from %lld, begins at %d", row,
                        (long long)bounds.read_from, batch.positions[first]);
        if (bounds.base * kv.page_size > first_seen(bounds, window, batch.positions[first]))
            return fail(PHLOEM_E_ARG, "batch: row %d reads before its first page, number %lld", row,
                        (long long)bounds.base);
        if (batch.positions[end - 1] / kv.page_size - bounds.base >= batch.table_stride)
            return fail(PHLOEM_E_ARG, "batch: position %d of row %d is beyond its %lld pages",
                        batch.positions[end - 1], row, (long long)batch.table_stride);
    }
    return PHLOEM_OK;
}

}  // namespace phloem

using namespace phloem;

extern "C" {

int32_t phloem_check_batch(const phloem_kv_layer *kv, const phloem_batch *batch, int32_t window,
                           int64_t max_position) {
    if (!kv || !batch) return fail(PHLOEM_E_ARG, "check_batch: null pointer");
    if (int32_t code = check_batch(*kv, *batch, window)) return code;
    for (int32_t row = 0; row < batch->num_rows; ++row) {
        const int32_t first = batch->row_start[row], end = batch->row_start[row + 1];
        if (end == first) continue;
        const int32_t last = batch->positions[end - 1];
        if (last >= max_position)
            return fail(PHLOEM_E_ARG, "batch: position %d of row %d, the context ends at %lld",
                        last, row, (long long)max_position);
        const RowBounds bounds = row_bounds(*batch, row);
        const int64_t *table = batch->tables + row * batch->table_stride;
        const int64_t low = first_seen(bounds, window, batch->positions[first]) / kv->page_size;
        for (int64_t i = low - bounds.base; i <= last / kv->page_size - bounds.base; ++i)
            if (table[i] < 0 || table[i] >= kv->num_pages)
                return fail(PHLOEM_E_ARG, "batch: slot %lld of row %d, the pool has %lld pages",
                            (long long)table[i], row, (long long)kv->num_pages);
    }
    return PHLOEM_OK;
}

int32_t phloem_attention(phloem_ctx *ctx, const phloem_attention_args *args,
                         const phloem_kv_layer *kv, const phloem_batch *batch) {
    if (!ctx || !args || !kv || !batch) return fail(PHLOEM_E_ARG, "attention: null pointer");
    if (int32_t code = check_batch(*kv, *batch, args->window)) return code;
    if (batch->num_tokens == 0) return PHLOEM_OK;
    if (args->num_heads < 1 || args->num_heads % kv->num_kv_heads)
        return fail(PHLOEM_E_ARG, "attention: %d heads over %d KV heads", args->num_heads,
                    kv->num_kv_heads);
    const int64_t width = (int64_t)args->num_heads * kv->head_dim;
    if (!args->q || !args->out || args->q_stride < width ||
        args->out_stride < args->num_heads * value_dim(*kv) || args->window < 0 ||
        !(args->softcap >= 0))
        return fail(PHLOEM_E_ARG, "attention: null pointer, stride below %lld, window %d, softcap %g",
                    (long long)width, args->window, args->softcap);
    try {
        run_attention(*ctx, {*args, *kv, *batch});
    } catch (const std::exception &error) {
        return fail(PHLOEM_E_MEMORY, "attention: %s", error.what());
    }
    return PHLOEM_OK;
}

}  // extern "C"
