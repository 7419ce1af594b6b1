#ifndef NVS_NATIVE_MODEL_H
#define NVS_NATIVE_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../../native/engine.h"

/* For native_schedules.c: what must be in a file, as far as that can be known, in memory. */

enum { FILE_NBYTES = 1 << 19, SECTOR_NBYTES = 512, PIECE_LIMIT = 40 };

struct model {
    nvs_file *file;   /* NULL once it is released */
    int check_fd;     /* reads through the page cache */
    uint64_t nbytes;  /* the file's size */
    bool direct;      /* at the start */
    uint32_t offset_alignment_nbytes;
    unsigned char bytes[FILE_NBYTES];
    unsigned char known[FILE_NBYTES]; /* 0xFF where `bytes` must be in the file, else 0 */
    uint16_t users[FILE_NBYTES / SECTOR_NBYTES]; /* reads in flight, or WRITTEN */
};

/* Numbers that look random; the same after the same seed. `limit` 0: any. */
void roll_from(uint64_t seed);
uint64_t roll(uint64_t limit);

/* Makes the file anew, of a random size and in a random mode. */
void model_open(struct model *model, const char *path, bool takes_any_alignment);

/* Lays out pieces that no request in flight is in the way of, by offset or in any order; none may be
 * found. A read may go beyond the end of the file. Memory is not filled in. */
size_t model_place(const struct model *model, int direction, nvs_piece *pieces);

/* Notes that the pieces are under way, or are no more. */
void model_begin(struct model *model, int direction, const nvs_piece *pieces, size_t count);
void model_end(struct model *model, int direction, const nvs_piece *pieces, size_t count);

/* A write has succeeded: its bytes, and the zeros of a direct file, are in the file. */
void model_note(struct model *model, const nvs_piece *piece);

/* Are these the file's bytes? With `flips` the lowest bit of any may be wrong. */
bool model_equals(const struct model *model, const void *memory, uint64_t offset_bytes,
                  uint64_t nbytes, bool flips);

/* Compares the file itself, then closes what model_open has opened beside `file`. */
bool model_close(struct model *model, bool compares);

/* Memory between guard bytes, at a random alignment within `whole`, which is guarded_nbytes long. */
size_t guarded_nbytes(uint64_t nbytes);
unsigned char *guarded(unsigned char *whole, uint64_t nbytes);
bool guards_hold(const nvs_piece *piece);

/* Random bytes. */
void fill(unsigned char *memory, uint64_t nbytes);

#endif
