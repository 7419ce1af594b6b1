/* An fp32 master as its bf16 parameter and a rest, without loss.
 *
 * Facts:
 * - The parameter is the master rounded to the nearest bf16, ties to even. Its bits less the master's
 *   upper half are the carry of that rounding, 0 or 1, also where it rounds to infinity.
 * - Parameter and lower half tell the carry but in a tie: 0x3f808000 and 0x3f7f8000 both round to
 *   0x3f80. 65537 masters share an even parameter, more than 16 bits can tell apart.
 * - A NaN is not rounded, and torch makes 0xffff of it in vector code but 0x7fc0 elsewhere. We take
 *   the first, with carry 0: before any lower half it is a NaN again.
 * - No master rounds up to a zero. Where one is found with a carry, somebody else has written it: it
 *   is taken for what it is, because one less than zero would be a NaN. Any other value that is not
 *   the rest's own gives a master that rounds to it.
 * - Seen on one core, ns an element of split and join: 0.13 and 0.10 with AVX2. The best loops that
 *   gcc vectorised for it took 0.24 and 0.16, for want of a way from vectors to bits. */
#include "master.h"
#include "interface.h"

/* Any tensor's memory will do. */
typedef uint32_t __attribute__((aligned(1), may_alias)) any_uint32;
typedef uint16_t __attribute__((aligned(1), may_alias)) any_uint16;

static void split_loop(const any_uint32 *master, any_uint16 *parameter, any_uint16 *rest,
                       uint8_t *carries, size_t numel)
{
    for (size_t i = 0; i < numel; i++) {
        uint32_t bits = master[i];
        uint32_t upper = bits >> 16;
        uint32_t rounded = (bits + 0x7fff + (upper & 1)) >> 16;
        uint32_t carry = rounded - upper;
        if ((bits & 0x7fffffff) > 0x7f800000) {
            rounded = 0xffff;
            carry = 0;
        }
        parameter[i] = (uint16_t)rounded;
        rest[i] = (uint16_t)bits;
        uint8_t earlier = i % 8 ? carries[i / 8] : 0;
        carries[i / 8] = (uint8_t)(earlier | carry << i % 8);
    }
}

static void join_loop(const any_uint16 *parameter, const any_uint16 *rest, const uint8_t *carries,
                      any_uint32 *master, size_t numel)
{
    for (size_t i = 0; i < numel; i++) {
        uint32_t carry = carries[i / 8] >> i % 8 & 1;
        uint32_t is_stale = carry && !(parameter[i] & 0x7fff);
        master[i] = ((uint32_t)parameter[i] - (is_stale ? 0 : carry)) << 16
                    | (is_stale ? 0 : rest[i]);
    }
}

void nvs_split_master(const void *master, void *parameter, void *rest, uint8_t *carries,
                      size_t numel)
{
    size_t done = 0;
#ifdef MASTER_HAS_AVX2
    if (__builtin_cpu_supports("avx2"))
        done = split_avx2(master, parameter, rest, carries, numel);
#endif
    split_loop((const any_uint32 *)master + done, (any_uint16 *)parameter + done,
               (any_uint16 *)rest + done, carries + done / 8, numel - done);
}

void nvs_join_master(const void *parameter, const void *rest, const uint8_t *carries, void *master,
                     size_t numel)
{
    size_t done = 0;
#ifdef MASTER_HAS_AVX2
    if (__builtin_cpu_supports("avx2"))
        done = join_avx2(parameter, rest, carries, master, numel);
#endif
    join_loop((const any_uint16 *)parameter + done, (const any_uint16 *)rest + done,
              carries + done / 8, (any_uint32 *)master + done, numel - done);
}
