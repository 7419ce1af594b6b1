/* master.c's loops in AVX2: upper and lower halves apart, 16 elements a vector. */
#include "master.h"

#ifdef MASTER_HAS_AVX2
#pragma GCC target("avx2")
#include <immintrin.h>
#include <string.h>

static __m256i load(const uint8_t *memory)
{
    return _mm256_loadu_si256((const __m256i *)memory);
}

static void store(uint8_t *memory, __m256i vector)
{
    _mm256_storeu_si256((__m256i *)memory, vector);
}

/* Lanes that lie 32 bytes apart, since what joins two vectors works lane by lane. */
static __m256i load_lanes(const uint8_t *memory)
{
    return _mm256_loadu2_m128i((const __m128i *)(memory + 32), (const __m128i *)memory);
}

/* 16 elements; returns the carries, all bits of an element's 16 or none. */
static inline __m256i split_vector(const uint8_t *master, uint8_t *parameter, uint8_t *rest)
{
    __m256i zero = _mm256_setzero_si256();
    __m256i lower_first = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    __m256i first = _mm256_shuffle_epi8(load_lanes(master), lower_first);
    __m256i second = _mm256_shuffle_epi8(load_lanes(master + 16), lower_first);
    __m256i lower = _mm256_unpacklo_epi64(first, second);
    __m256i upper = _mm256_unpackhi_epi64(first, second);

    /* Rounded up: the lower half is above 0x8000, or at it under an odd upper one. Comparisons are
     * signed only, so the highest bit is turned over. */
    __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi16(1));
    __m256i over = _mm256_adds_epu16(lower, odd);
    __m256i is_up = _mm256_cmpgt_epi16(_mm256_xor_si256(over, _mm256_set1_epi16(INT16_MIN)), zero);

    /* A NaN: above infinity, 0x7f80 and a lower half of 0. An equal comparison is -1. */
    __m256i magnitude = _mm256_and_si256(upper, _mm256_set1_epi16(0x7fff));
    __m256i whole = _mm256_add_epi16(magnitude, _mm256_cmpeq_epi16(lower, zero));
    __m256i is_nan = _mm256_cmpgt_epi16(whole, _mm256_set1_epi16(0x7f7f));

    __m256i carry = _mm256_andnot_si256(is_nan, is_up);
    store(rest, lower);
    store(parameter, _mm256_or_si256(_mm256_sub_epi16(upper, carry), is_nan));
    return carry;
}

size_t split_avx2(const void *master, void *parameter, void *rest, uint8_t *carries, size_t numel)
{
    const uint8_t *from = master;
    uint8_t *to = parameter, *beside = rest;
    size_t i = 0;
    for (; i + 32 <= numel; i += 32) {
        __m256i first = split_vector(from + 4 * i, to + 2 * i, beside + 2 * i);
        __m256i second = split_vector(from + 4 * i + 64, to + 2 * i + 32, beside + 2 * i + 32);
        __m256i packed = _mm256_packs_epi16(first, second); /* eights 0, 2, 1, 3 */
        __m256i ordered = _mm256_permute4x64_epi64(packed, _MM_SHUFFLE(3, 1, 2, 0));
        int32_t bits = _mm256_movemask_epi8(ordered);
        memcpy(carries + i / 8, &bits, 4);
    }
    return i;
}

size_t join_avx2(const void *parameter, const void *rest, const uint8_t *carries, void *master,
                 size_t numel)
{
    const uint8_t *from = parameter, *beside = rest;
    uint8_t *to = master;
    __m256i own_bit = _mm256_setr_epi16(1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 4, 1 << 5, 1 << 6,
                                        1 << 7, 1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12,
                                        1 << 13, 1 << 14, INT16_MIN);
    size_t i = 0;
    for (; i + 16 <= numel; i += 16) {
        int16_t bits;
        memcpy(&bits, carries + i / 8, 2);
        __m256i own = _mm256_and_si256(_mm256_set1_epi16(bits), own_bit);
        __m256i carry = _mm256_cmpeq_epi16(own, own_bit); /* -1, which is added */
        __m256i value = load(from + 2 * i);
        __m256i is_zero = _mm256_cmpeq_epi16(_mm256_slli_epi16(value, 1), _mm256_setzero_si256());
        __m256i is_stale = _mm256_and_si256(is_zero, carry);
        __m256i upper = _mm256_add_epi16(value, _mm256_andnot_si256(is_stale, carry));
        __m256i lower = _mm256_andnot_si256(is_stale, load(beside + 2 * i));
        __m256i even = _mm256_unpacklo_epi16(lower, upper); /* elements 0 to 3 and 8 to 11 */
        __m256i odd = _mm256_unpackhi_epi16(lower, upper);
        store(to + 4 * i, _mm256_permute2x128_si256(even, odd, 0x20));
        store(to + 4 * i + 32, _mm256_permute2x128_si256(even, odd, 0x31));
    }
    return i;
}
#endif
