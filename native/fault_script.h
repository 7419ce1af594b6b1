#ifndef NVS_FAULT_SCRIPT_H
#define NVS_FAULT_SCRIPT_H

#include <stdbool.h>
#include <stdint.h>

/* Which block meets which fault. A script is rules separated by ';':
 *     <read|write|any> <n|*> <action> [number]
 *     seed <s> [rate <percent>] [<action>,<action>,...]
 * In the first form n counts the blocks of that direction as they are submitted (retries included,
 * from 1, since the start or since the script was injected) and * is every one. The second draws: of
 * all blocks that many in a hundred (10) meet one of these actions (all but flip and never), with
 * a number of its own. Seed and order of submission decide alone, so a schedule is one number.
 * The first rule that matches acts:
 *     short N    says that it moved N bytes only        errno N    completes with that error
 *     refuse N   is not taken, because of that error    busy       the same with EAGAIN
 *     delay MS   is started that much later             never      waits until a script is injected
 *     late N     is handed back after N others, or when no other is under way
 *     flip       a read comes back with one bit wrong
 * Example: "read 3 short 4096; write 1 errno 28; read * delay 5"; "seed 7 rate 100 late". */

enum fault_action {
    FAULT_SHORT, FAULT_ERRNO, FAULT_REFUSE, FAULT_BUSY, FAULT_DELAY, FAULT_NEVER, FAULT_LATE,
    FAULT_FLIP, FAULT_ACTION_COUNT
};

/* What one block meets. */
struct fate {
    enum fault_action action;
    uint64_t number;     /* bytes, an errno, ms as the script has it, or others to come first */
    int64_t delay_ns;
    uint32_t generation; /* the script's */
};

struct fault_rule {
    bool draws;
    int direction;      /* enum nvs_direction, or 2 for both */
    uint64_t at;        /* 0: every one */
    struct fate fate;
    uint64_t seed;
    uint32_t percent;
    uint32_t actions;   /* a bit for each that may be drawn */
};

enum { FAULT_RULE_LIMIT = 32 };

struct fault_script {
    struct fault_rule rules[FAULT_RULE_LIMIT];
    int rule_count;
    uint64_t counts[2];  /* blocks seen, by direction */
    uint32_t generation; /* how many were injected before it */
};

/* 0, -EINVAL when it isn't understood, -ENOMEM. */
int fault_script_parse(const char *text, struct fault_script *script);

/* Counts the block and says what it meets, if anything. */
bool fault_script_next(struct fault_script *script, int direction, uint32_t nbytes,
                       struct fate *fate);

/* The block that was counted last will be submitted again. */
void fault_script_uncount(struct fault_script *script, int direction);

#endif
