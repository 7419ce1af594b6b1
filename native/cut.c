/* From requests to blocks: which bytes go together, and what must pass through memory of ours.
 *
 * Facts (docs/design.md has the figures). Small operations in the order of the file are 2.5 to 4.5
 * times as fast as in a random one, and neighbours in the file moved by one vectored block 3.4 to
 * 11.6 times, at 4 KiB; at 64 KiB 1.3 to 2.5 times; from 256 KiB it gains nothing. So a request's
 * pieces are sorted, and small neighbours share a block. Reading over a small gap (to nowhere) takes
 * less time than another block: 4 KiB at 2.5 GB/s 1.6 us, a block at random 7 to 16 us. */
#define _GNU_SOURCE
#include "engine.h"
#include "split.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* A piece with at most that much left shares a block with others. */
enum { SHARED_NBYTES = 131072 };
/* Most that is read over; on faster drives both times shrink alike. */
enum { GAP_NBYTES = 8192 };
/* Up to here a bounced tail does not keep the rest out of registered memory that is worth it: a
 * longer piece's tail is a block of its own (about 7 us). */
enum { TAIL_CUT_NBYTES = 65536 };
static const size_t BOUNCE_ALIGNMENT_NBYTES = 4096;

static bool has_memory(nvs_engine *engine, struct block *block, bool bouncing)
{
    if (!block->spans)
        block->spans = calloc(VECTOR_LIMIT, sizeof *block->spans);
    if (!block->vectors)
        block->vectors = calloc(VECTOR_LIMIT, sizeof *block->vectors);
    if (bouncing && !block->bounce
        && posix_memalign((void **)&block->bounce, BOUNCE_ALIGNMENT_NBYTES, engine->block_nbytes) != 0)
        block->bounce = NULL;
    return block->spans && block->vectors && (!bouncing || block->bounce);
}

/* --- one span ---------------------------------------------------------------------------------- */

static void add_in_place(struct block *block, struct piece *piece, char *memory, uint32_t nbytes)
{
    block->spans[block->span_count++] = (struct span){piece, memory, NULL, nbytes, nbytes};
    block->wanted_nbytes += nbytes;
    block->length_nbytes += nbytes;
}

static bool is_of_device(nvs_engine *engine, const char *memory)
{
    return engine->memory_is_of_device && memory_table_find(&engine->memory_table, memory, 1) >= 0;
}

/* What O_DIRECT would refuse, padded up to the alignment. False when memory is short, or a device's:
 * bytes there can't be copied here. */
static bool add_bounced(nvs_engine *engine, struct block *block, struct piece *piece, char *memory,
                        uint32_t nbytes)
{
    if (is_of_device(engine, memory) || !has_memory(engine, block, true))
        return false;
    const nvs_request *request = block->request;
    bool is_read = request->direction == NVS_READ;
    uint32_t length_nbytes = (uint32_t)round_up(nbytes, request->file->offset_alignment_nbytes);
    char *bounce = block->bounce + block->bounced_nbytes;
    block->bounced_nbytes += length_nbytes;
    assert(block->bounced_nbytes <= engine->block_nbytes);
    if (!is_read) {
        memcpy(bounce, memory, nbytes);
        memset(bounce + nbytes, 0, length_nbytes - nbytes);
    }
    block->spans[block->span_count++] =
        (struct span){piece, bounce, is_read ? memory : NULL, nbytes, length_nbytes};
    block->wanted_nbytes += nbytes;
    block->length_nbytes += length_nbytes;
    count(engine, BOUNCED, nbytes);
    return true;
}

/* Bytes of the piece that is next, from where it is cut, at most room_nbytes. Returns how many, 0
 * when it can't be served. */
static uint32_t add_spans(nvs_engine *engine, struct block *block, struct piece *piece,
                          uint64_t room_nbytes)
{
    const nvs_request *request = block->request;
    const nvs_file *file = request->file;
    uint32_t alignment_nbytes = file->offset_alignment_nbytes;
    char *memory = piece->memory + request->cut_nbytes;
    uint32_t nbytes = split_next_nbytes(piece->nbytes, request->cut_nbytes, room_nbytes);
    bool is_aligned = (uintptr_t)memory % file->memory_alignment_nbytes == 0;
    bool is_direct = block->member->direct;
    if (is_direct && !is_aligned)
        return add_bounced(engine, block, piece, memory, nbytes) ? nbytes : 0;
    /* Where registered pieces of memory meet, blocks are cut too, unless that misaligns the next. */
    uint32_t span_nbytes = (uint32_t)memory_table_span(&engine->memory_table, memory, nbytes);
    if (span_nbytes % alignment_nbytes == 0)
        nbytes = span_nbytes;
    uint32_t whole_nbytes =
        is_direct ? (uint32_t)round_down(nbytes, alignment_nbytes) : nbytes;
    uint32_t tail_nbytes = nbytes - whole_nbytes;
    bool takes_tail = tail_nbytes > 0 && whole_nbytes <= TAIL_CUT_NBYTES
                      && block->span_count + 2 <= VECTOR_LIMIT;
    if (takes_tail && !has_memory(engine, block, true))
        return 0;
    if (whole_nbytes > 0)
        add_in_place(block, piece, memory, whole_nbytes);
    if (!takes_tail && whole_nbytes > 0)
        return whole_nbytes;
    bool is_added = add_bounced(engine, block, piece, memory + whole_nbytes, tail_nbytes);
    return is_added ? nbytes : whole_nbytes;
}

/* --- one block --------------------------------------------------------------------------------- */

static void skip_empty(nvs_request *request)
{
    while (request->at_piece < request->piece_count
           && request->cut_nbytes >= request->pieces[request->at_piece].nbytes) {
        request->at_piece++;
        request->cut_nbytes = 0;
    }
}

/* How far behind the block's end the next piece begins, or -1 if it has no part in the block. */
static int64_t gap_to_next(const struct block *block, const nvs_request *request,
                           uint64_t most_nbytes)
{
    if (request->at_piece == request->piece_count)
        return -1;
    const struct piece *piece = &request->pieces[request->at_piece];
    const struct span *last = &block->spans[block->span_count - 1];
    uint64_t begin_bytes = piece->offset_bytes + request->cut_nbytes;
    uint64_t end_bytes = block->offset_bytes + block->length_nbytes;
    if (last->piece == piece || begin_bytes < end_bytes)
        return -1;
    uint64_t gap_nbytes = begin_bytes - end_bytes;
    bool crosses = request->direction == NVS_READ && request->file->memory_alignment_nbytes > 1;
    if (gap_nbytes > (crosses ? GAP_NBYTES : 0) || gap_nbytes % request->file->offset_alignment_nbytes)
        return -1;
    uint64_t left_nbytes =
        round_up(piece->nbytes - request->cut_nbytes, request->file->offset_alignment_nbytes);
    uint64_t room_nbytes = most_nbytes > block->length_nbytes ? most_nbytes - block->length_nbytes : 0;
    bool continues = gap_nbytes == 0 && room_nbytes > 0
                     && last->memory + last->length_nbytes == piece->memory + request->cut_nbytes;
    bool is_small = left_nbytes <= SHARED_NBYTES && gap_nbytes + left_nbytes <= room_nbytes;
    uint32_t span_count = block->span_count + (gap_nbytes > 0 ? 2 : 1);
    return span_count <= VECTOR_LIMIT && (continues || is_small) ? (int64_t)gap_nbytes : -1;
}

static bool add_gap(nvs_engine *engine, struct block *block, uint32_t nbytes)
{
    if (!engine->gap_memory
        && posix_memalign((void **)&engine->gap_memory, BOUNCE_ALIGNMENT_NBYTES, GAP_NBYTES) != 0)
        engine->gap_memory = NULL;
    if (!engine->gap_memory)
        return false;
    block->spans[block->span_count++] = (struct span){NULL, engine->gap_memory, NULL, 0, nbytes};
    block->length_nbytes += nbytes;
    return true;
}

/* What of the next piece has room, behind the gap before it. False when memory is short. */
static bool add_piece(nvs_engine *engine, struct block *block, uint32_t gap_nbytes,
                      uint64_t most_nbytes)
{
    nvs_request *request = block->request;
    uint32_t alignment_nbytes = request->file->offset_alignment_nbytes;
    if (gap_nbytes > 0 && !add_gap(engine, block, gap_nbytes))
        return false;
    uint64_t room_nbytes = round_down(most_nbytes - block->length_nbytes, alignment_nbytes);
    if (block->span_count == 0 && room_nbytes == 0)
        room_nbytes = alignment_nbytes;
    struct piece *piece = &request->pieces[request->at_piece];
    uint32_t nbytes = room_nbytes > 0 ? add_spans(engine, block, piece, room_nbytes) : 0;
    request->cut_nbytes += nbytes;
    if (nbytes == 0 && gap_nbytes > 0) {
        block->span_count--;
        block->length_nbytes -= gap_nbytes;
    }
    skip_empty(request);
    return nbytes > 0;
}

static void fill_block(nvs_engine *engine, struct block *block, uint64_t most_nbytes)
{
    int64_t gap_nbytes = 0;
    while (gap_nbytes >= 0 && add_piece(engine, block, (uint32_t)gap_nbytes, most_nbytes))
        gap_nbytes = gap_to_next(block, block->request, most_nbytes);
}

/* A piece's first failure is what is told of it. */
static void note_failure(nvs_request *request, struct piece *piece, int status, uint32_t tries,
                         uint64_t error_offset_bytes)
{
    if (piece->status != 0)
        return;
    piece->status = status;
    piece->tries = tries;
    piece->error_offset_bytes = error_offset_bytes;
    request->failure_count++;
}

/* What was not yet cut of a failed piece is dropped. */
static void drop_rest(nvs_engine *engine, nvs_request *request, const struct piece *piece)
{
    if (!request->queued || &request->pieces[request->at_piece] != piece)
        return;
    request->cut_nbytes = piece->nbytes;
    skip_empty(request);
    if (request->at_piece == request->piece_count) {
        lane_remove(&engine->lanes[request->lane], request);
        request->queued = false;
    }
}

bool cut_block(nvs_engine *engine, struct lane *lane, uint64_t most_nbytes)
{
    nvs_request *request = lane->head;
    struct block *block = engine->free_blocks[engine->free_count - 1];
    skip_empty(request);
    struct piece *piece = &request->pieces[request->at_piece];
    block->request = request;
    block->offset_bytes = piece->offset_bytes + request->cut_nbytes;
    struct stripe_place place = stripe_find(&request->file->layout, block->offset_bytes);
    block->member = &request->file->members[place.member];
    block->member_offset_bytes = place.offset_bytes;
    if (most_nbytes > place.left_nbytes)
        most_nbytes = place.left_nbytes;
    block->span_count = block->span_at = block->bounced_nbytes = 0;
    block->wanted_nbytes = block->length_nbytes = 0;
    block->over_nbytes = block->done_nbytes = block->tries = 0;
    block->careful = false;
    if (has_memory(engine, block, false))
        fill_block(engine, block, most_nbytes);
    if (block->span_count == 0) {
        int status = is_of_device(engine, piece->memory + request->cut_nbytes) ? -EINVAL : -ENOMEM;
        note_failure(request, piece, status, 0, block->offset_bytes);
        drop_rest(engine, request, piece);
        settle_request(engine, request);
        return false;
    }
    engine->free_count--;
    request->in_flight_count++;
    lane->in_flight_nbytes += block->wanted_nbytes;
    if (request->lane == NVS_DEMAND)
        lane_note_demand(engine);
    if (request->at_piece == request->piece_count) {
        lane_remove(lane, request);
        request->queued = false;
    }
    count(engine, BLOCKS, 1);
    return true;
}

void aim_block(struct block *block)
{
    struct backend_op *op = &block->op;
    uint32_t skip_nbytes = block->done_nbytes - block->over_nbytes;
    op->vectors = block->vectors;
    op->vector_count = 0;
    op->nbytes = 0;
    op->offset_bytes = block->member_offset_bytes + block->done_nbytes;
    const struct span *span = NULL;
    for (uint32_t i = block->span_at; i < block->span_count; i++) {
        if (block->careful && span && span->piece != block->spans[i].piece)
            break;
        span = &block->spans[i];
        char *memory = span->memory + skip_nbytes;
        uint32_t nbytes = span->length_nbytes - skip_nbytes;
        skip_nbytes = 0;
        struct iovec *last = op->vector_count > 0 ? &block->vectors[op->vector_count - 1] : NULL;
        if (last && (char *)last->iov_base + last->iov_len == memory)
            last->iov_len += nbytes;
        else
            block->vectors[op->vector_count++] = (struct iovec){memory, nbytes};
        op->nbytes += nbytes;
    }
    block->aim_nbytes = block->done_nbytes + op->nbytes;
    block->aim_padding_nbytes = span->length_nbytes - span->wanted_nbytes;
}

/* --- ends -------------------------------------------------------------------------------------- */

void close_spans(struct block *block)
{
    while (block->span_at < block->span_count) {
        const struct span *span = &block->spans[block->span_at];
        if (block->over_nbytes + span->wanted_nbytes > block->done_nbytes)
            break;
        if (span->copy_to)
            memcpy(span->copy_to, span->memory, span->wanted_nbytes);
        if (span->piece)
            span->piece->done_nbytes += span->wanted_nbytes;
        block->over_nbytes += span->length_nbytes;
        block->span_at++;
        if (block->done_nbytes < block->over_nbytes) /* a read may have ended within the padding */
            block->done_nbytes = block->over_nbytes;
    }
}

bool is_shared(const struct block *block)
{
    assert(block->spans[block->span_at].piece);
    return block->spans[block->span_at].piece != block->spans[block->span_count - 1].piece;
}

void fail_piece(nvs_engine *engine, struct block *block, int status)
{
    struct piece *piece = block->spans[block->span_at].piece;
    note_failure(block->request, piece, status, block->tries,
                 block->offset_bytes + block->done_nbytes);
    drop_rest(engine, block->request, piece);
    while (block->span_at < block->span_count && block->spans[block->span_at].piece == piece)
        block->over_nbytes += block->spans[block->span_at++].length_nbytes;
    block->done_nbytes = block->over_nbytes;
    close_spans(block); /* a gap behind it */
}

void request_stop(nvs_engine *engine, nvs_request *request, int status)
{
    if (!request->queued)
        return;
    for (; request->at_piece < request->piece_count; request->at_piece++) {
        struct piece *piece = &request->pieces[request->at_piece];
        if (piece->nbytes > 0)
            note_failure(request, piece, status, 0, piece->offset_bytes + request->cut_nbytes);
        request->cut_nbytes = 0;
    }
    lane_remove(&engine->lanes[request->lane], request);
    request->queued = false;
    settle_request(engine, request);
}
