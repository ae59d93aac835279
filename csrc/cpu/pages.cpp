// Copies of parts of pages between two pools of one layout: what backups and loads move.

#include <cstring>

#include "context.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

using namespace phloem;

namespace {

// From here on the bytes would only push out weights and what was copied before them: they are
// written past the caches. Less is probably read from there soon, layer by layer.
constexpr int64_t kStreamBytes = 2 << 20;

#if defined(__SSE2__)
// The hardware does not read ahead across 4 KiB, and pages lie anywhere.
constexpr size_t kAhead = 1024;

void stream_run(char *to, const char *from, size_t bytes) {
    size_t i = -(uintptr_t)to % 64;
    if (i > bytes) i = bytes;
    memcpy(to, from, i);
    for (; i + 64 <= bytes; i += 64) {
        _mm_prefetch(from + i + kAhead, _MM_HINT_NTA);
        __m128i a = _mm_loadu_si128((const __m128i *)(from + i));
        __m128i b = _mm_loadu_si128((const __m128i *)(from + i + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + i + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(from + i + 48));
        _mm_stream_si128((__m128i *)(to + i), a);
        _mm_stream_si128((__m128i *)(to + i + 16), b);
        _mm_stream_si128((__m128i *)(to + i + 32), c);
        _mm_stream_si128((__m128i *)(to + i + 48), d);
    }
    memcpy(to + i, from + i, bytes - i);
}

// Streamed stores are not ordered with others: whoever is told of the copy must see it.
void end_stream() { _mm_sfence(); }
#else
void stream_run(char *to, const char *from, size_t bytes) { memcpy(to, from, bytes); }
void end_stream() {}
#endif

}  // namespace

extern "C" int32_t phloem_copy_segments(void *dst, const void *src, const int64_t *dst_slots,
                                        const int64_t *src_slots, const phloem_segments *s) {
    if (!s || s->num_pages < 0 || s->num_segments < 1 || s->segment_bytes < 1 || s->offset < 0 ||
        (s->num_pages && (!dst || !src || !dst_slots || !src_slots)))
        return fail(PHLOEM_E_ARG, "copy_segments: no such segments");
    if (s->offset + (s->num_segments - 1) * s->segment_stride + s->segment_bytes > s->page_bytes)
        return fail(PHLOEM_E_ARG, "copy_segments: %lld segments reach beyond the page",
                    (long long)s->num_segments);
    const bool stream = s->num_pages * s->num_segments * s->segment_bytes >= kStreamBytes;
    for (int64_t i = 0; i < s->num_pages; ++i) {
        char *to = (char *)dst + dst_slots[i] * s->page_bytes + s->offset;
        const char *from = (const char *)src + src_slots[i] * s->page_bytes + s->offset;
        for (int64_t j = 0; j < s->num_segments; ++j) {
            const int64_t at = j * s->segment_stride;
            if (stream)
                stream_run(to + at, from + at, (size_t)s->segment_bytes);
            else
                memcpy(to + at, from + at, (size_t)s->segment_bytes);
        }
    }
    if (stream) end_stream();
    return PHLOEM_OK;
}
