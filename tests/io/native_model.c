#define _GNU_SOURCE
#include "native_model.h"

#include "../../native/split.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { WRITTEN = 0xFFFF, LEAST_FILE_NBYTES = 1 << 16, REQUEST_NBYTES = 300000, PAGE_NBYTES = 4096,
       GUARD_NBYTES = 64, GUARD = 0x5C };

static uint64_t roll_state;

void roll_from(uint64_t seed)
{
    roll_state = seed * 0x9E3779B97F4A7C15 + 1;
}

uint64_t roll(uint64_t limit)
{
    roll_state ^= roll_state << 13;
    roll_state ^= roll_state >> 7;
    roll_state ^= roll_state << 17;
    uint64_t mixed = (roll_state ^ roll_state >> 29) * 0xD6E8FEB86659FD93 >> 16;
    return limit > 0 ? mixed % limit : mixed;
}

/* The same for all schedules: filling a file anew would take longer than the rest. */
static const unsigned char *first_bytes(void)
{
    static unsigned char bytes[FILE_NBYTES];
    for (uint32_t i = 0; bytes[FILE_NBYTES - 1] == 0 && i < FILE_NBYTES; i++)
        bytes[i] = (unsigned char)(1 + (i * 2654435761U >> 13) % 255);
    return bytes;
}

void model_open(struct model *model, const char *path, bool takes_any_alignment)
{
    /* Half of them end within a page. */
    model->nbytes = LEAST_FILE_NBYTES + roll(FILE_NBYTES - LEAST_FILE_NBYTES);
    if (roll(2))
        model->nbytes = round_down(model->nbytes, PAGE_NBYTES);
    model->check_fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (model->check_fd < 0
        || pwrite(model->check_fd, first_bytes(), model->nbytes, 0) != (ssize_t)model->nbytes)
        abort();
    memcpy(model->bytes, first_bytes(), model->nbytes);
    memset(model->known, 0xFF, model->nbytes);
    memset(model->known + model->nbytes, 0, FILE_NBYTES - model->nbytes);
    memset(model->users, 0, sizeof model->users);
    int mode = roll(4) == 0 ? NVS_DIRECT_OFF : roll(4) == 0 ? NVS_DIRECT_REQUIRE : NVS_DIRECT_PREFER;
    int fd = open(path, O_RDWR | O_CLOEXEC | (mode != NVS_DIRECT_OFF ? O_DIRECT : 0));
    if (fd < 0) { /* a filesystem without */
        mode = NVS_DIRECT_OFF;
        fd = open(path, O_RDWR | O_CLOEXEC);
    }
    model->direct = mode != NVS_DIRECT_OFF;
    model->offset_alignment_nbytes = takes_any_alignment && roll(2) ? SECTOR_NBYTES : PAGE_NBYTES;
    uint32_t memory_alignment_nbytes =
        takes_any_alignment && roll(2) ? 4U << roll(6) : SECTOR_NBYTES;
    static const uint32_t whole = 1;
    const nvs_member member = {fd, mode};
    const nvs_stripes stripes = {&whole, 1, 0};
    model->file =
        nvs_file_new(&member, &stripes, model->offset_alignment_nbytes, memory_alignment_nbytes);
    if (!model->file)
        abort();
    if (roll(4) == 0) { /* a device of few tags */
        model->file->members[0].tag_count = 1 + (uint32_t)roll(8);
        model->file->members[0].tag_limit_nbytes = 4096U << roll(5);
    }
}

static uint64_t pick_nbytes(void)
{
    switch (roll(16)) {
    case 0: return 0;
    case 1: return roll(200001);
    case 2: case 3: return roll(32768);
    case 4: case 5: case 6: case 7: return PAGE_NBYTES * (1 + roll(4));
    default: return 1 + roll(PAGE_NBYTES);
    }
}

static bool is_free(const struct model *model, int direction, uint64_t begin, uint64_t end)
{
    for (uint64_t at = begin / SECTOR_NBYTES; at * SECTOR_NBYTES < end; at++)
        if (direction == NVS_WRITE ? model->users[at] > 0 : model->users[at] == WRITTEN)
            return false;
    return true;
}

/* Where a direct write's padding may reach. */
static uint64_t padded_end(const struct model *model, const nvs_piece *piece)
{
    uint64_t end = round_up(piece->offset_bytes + piece->nbytes, model->offset_alignment_nbytes);
    return end < FILE_NBYTES ? end : FILE_NBYTES;
}

static void shuffle(nvs_piece *pieces, size_t count)
{
    for (size_t i = count; i > 1; i--) {
        size_t other = roll(i);
        nvs_piece last = pieces[i - 1];
        pieces[i - 1] = pieces[other];
        pieces[other] = last;
    }
}

size_t model_place(const struct model *model, int direction, nvs_piece *pieces)
{
    size_t wanted_count = 1 + roll(1 + roll(PIECE_LIMIT)), count = 0;
    uint64_t step_nbytes = model->direct ? model->offset_alignment_nbytes : 1 + roll(700);
    uint64_t near_nbytes = roll(8) == 0 ? 20000 : model->nbytes - 1; /* to the end */
    uint64_t at_bytes = (model->nbytes - 1 - roll(near_nbytes)) / step_nbytes * step_nbytes;
    uint64_t end_bytes = direction == NVS_WRITE ? round_down(model->nbytes, PAGE_NBYTES)
                         : roll(8) == 0 ? FILE_NBYTES : model->nbytes;
    uint64_t total_nbytes = 0;
    while (count < wanted_count && at_bytes < end_bytes && total_nbytes < REQUEST_NBYTES) {
        nvs_piece piece = {NULL, at_bytes, pick_nbytes()};
        if (piece.nbytes > end_bytes - at_bytes)
            piece.nbytes = end_bytes - at_bytes;
        if (!is_free(model, direction, at_bytes, padded_end(model, &piece)))
            break;
        pieces[count++] = piece;
        total_nbytes += piece.nbytes;
        /* Mostly neighbours. */
        at_bytes = model->direct ? round_up(at_bytes + piece.nbytes, model->offset_alignment_nbytes)
                                 : at_bytes + piece.nbytes;
        at_bytes += roll(3) == 0 ? step_nbytes * (1 + roll(20)) : 0;
    }
    if (roll(2))
        shuffle(pieces, count);
    return count;
}

void model_begin(struct model *model, int direction, const nvs_piece *pieces, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint64_t end = padded_end(model, &pieces[i]);
        if (pieces[i].nbytes == 0)
            continue;
        if (direction == NVS_WRITE)
            memset(model->known + pieces[i].offset_bytes, 0,
                   model->direct ? end - pieces[i].offset_bytes : pieces[i].nbytes);
        for (uint64_t at = pieces[i].offset_bytes / SECTOR_NBYTES; at * SECTOR_NBYTES < end; at++)
            model->users[at] = direction == NVS_WRITE ? WRITTEN : (uint16_t)(model->users[at] + 1);
    }
}

void model_end(struct model *model, int direction, const nvs_piece *pieces, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint64_t end = padded_end(model, &pieces[i]);
        if (pieces[i].nbytes == 0)
            continue;
        for (uint64_t at = pieces[i].offset_bytes / SECTOR_NBYTES; at * SECTOR_NBYTES < end; at++)
            model->users[at] = direction == NVS_WRITE ? 0 : (uint16_t)(model->users[at] - 1);
    }
}

void model_note(struct model *model, const nvs_piece *piece)
{
    memcpy(model->bytes + piece->offset_bytes, piece->memory, piece->nbytes);
    memset(model->known + piece->offset_bytes, 0xFF, piece->nbytes);
    /* Unless it has fallen back, and may have moved the padding or not. */
    int32_t fallback_errno;
    if (!model->file || !nvs_file_is_direct(model->file, 0, &fallback_errno))
        return;
    uint64_t end = piece->offset_bytes + piece->nbytes;
    memset(model->bytes + end, 0, padded_end(model, piece) - end);
    memset(model->known + end, 0xFF, padded_end(model, piece) - end);
}

bool model_equals(const struct model *model, const void *memory, uint64_t offset_bytes,
                  uint64_t nbytes, bool flips)
{
    if (memcmp(memory, model->bytes + offset_bytes, nbytes) == 0)
        return true;
    const unsigned char *got = memory;
    const unsigned char *bytes = model->bytes + offset_bytes;
    const unsigned char *known = model->known + offset_bytes;
    unsigned char wrong = 0;
    for (uint64_t i = 0; i < nbytes; i++)
        wrong |= (got[i] ^ bytes[i]) & known[i];
    return (flips ? wrong & 0xFE : wrong) == 0;
}

bool model_close(struct model *model, bool compares)
{
    static unsigned char found[FILE_NBYTES];
    bool equal = true;
    if (compares)
        equal = pread(model->check_fd, found, FILE_NBYTES, 0) == (ssize_t)model->nbytes
                && model_equals(model, found, 0, model->nbytes, false);
    close(model->check_fd);
    return equal;
}

size_t guarded_nbytes(uint64_t nbytes)
{
    return nbytes + 2 * GUARD_NBYTES + PAGE_NBYTES;
}

unsigned char *guarded(unsigned char *whole, uint64_t nbytes)
{
    static const uintptr_t alignments[] = {PAGE_NBYTES, 512, 64, 1};
    uint64_t alignment = alignments[roll(4)];
    unsigned char *memory = (unsigned char *)round_up((uintptr_t)whole + GUARD_NBYTES, alignment);
    memset(memory - GUARD_NBYTES, GUARD, GUARD_NBYTES);
    memset(memory + nbytes, GUARD, GUARD_NBYTES);
    return memory;
}

bool guards_hold(const nvs_piece *piece)
{
    unsigned char guard[GUARD_NBYTES];
    memset(guard, GUARD, sizeof guard);
    const unsigned char *memory = piece->memory;
    return memcmp(memory - GUARD_NBYTES, guard, GUARD_NBYTES) == 0
           && memcmp(memory + piece->nbytes, guard, GUARD_NBYTES) == 0;
}

/* From a random place of a table: drawing each byte would take longer than the transfer. */
void fill(unsigned char *memory, uint64_t nbytes)
{
    static uint64_t noise[FILE_NBYTES / sizeof(uint64_t)];
    for (size_t i = 0; noise[FILE_NBYTES / sizeof *noise - 1] == 0; i++)
        noise[i] = ((i + 1) * 0x9E3779B97F4A7C15 ^ i << 40) * 0xD6E8FEB86659FD93 | 1;
    memcpy(memory, (unsigned char *)noise + roll(sizeof noise - nbytes), nbytes);
}
