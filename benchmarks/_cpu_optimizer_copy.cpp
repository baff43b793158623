// A copy whose stores go around the cache, as large memcpy and STREAM do: one byte read for each byte written.

#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

extern "C" void copy_streamed(char *to, const char *from, int64_t bytes) {
    int64_t i = 0;
#if defined(__AVX512F__)
    if ((uintptr_t)to % 64 == 0)
        for (; i + 64 <= bytes; i += 64) _mm512_stream_si512((__m512i *)(to + i), _mm512_loadu_si512(from + i));
#elif defined(__AVX2__)
    if ((uintptr_t)to % 32 == 0)
        for (; i + 32 <= bytes; i += 32)
            _mm256_stream_si256((__m256i *)(to + i), _mm256_loadu_si256((const __m256i *)(from + i)));
#endif
    memcpy(to + i, from + i, bytes - i);
#if defined(__SSE2__)
    _mm_sfence();
#endif
}
