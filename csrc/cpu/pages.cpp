// Copies of parts of pages between two pools of one layout: what a load moves layer by layer.

#include <cstring>

#include "context.h"

using namespace phloem;

extern "C" int32_t phloem_copy_segments(void *dst, const void *src, const int64_t *dst_slots,
                                        const int64_t *src_slots, const phloem_segments *s) {
    if (!s || s->num_pages < 0 || s->num_segments < 1 || s->segment_bytes < 1 || s->offset < 0 ||
        (s->num_pages && (!dst || !src || !dst_slots || !src_slots)))
        return fail(PHLOEM_E_ARG, "copy_segments: no such segments");
    if (s->offset + (s->num_segments - 1) * s->segment_stride + s->segment_bytes > s->page_bytes)
        return fail(PHLOEM_E_ARG, "copy_segments: %lld segments reach beyond the page",
                    (long long)s->num_segments);
    for (int64_t i = 0; i < s->num_pages; ++i) {
        char *to = (char *)dst + dst_slots[i] * s->page_bytes + s->offset;
        const char *from = (const char *)src + src_slots[i] * s->page_bytes + s->offset;
        for (int64_t j = 0; j < s->num_segments; ++j)
            memcpy(to + j * s->segment_stride, from + j * s->segment_stride,
                   (size_t)s->segment_bytes);
    }
    return PHLOEM_OK;
}
