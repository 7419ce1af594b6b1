#define _GNU_SOURCE
#include "fault_script.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { ANY_DIRECTION = 2, DEFAULT_PERCENT = 10 };
static const int64_t NS_PER_MS = 1000000;
static const uint64_t DRAWN_DELAY_LIMIT_NS = 1000000;
static const uint64_t DRAWN_LATE_LIMIT = 8;
static const char *const action_names[] = {"short", "errno", "refuse", "busy",
                                           "delay", "never", "late",   "flip"};
static const bool action_takes_number[] = {true, true, true, false, true, false, true, false};
/* What an engine survives or reports by itself. */
static const uint32_t default_actions =
    ((1U << FAULT_ACTION_COUNT) - 1) & ~(1U << FAULT_FLIP | 1U << FAULT_NEVER);

/* --- reading ----------------------------------------------------------------------------------- */

static bool read_number(const char *text, uint64_t *number)
{
    char *end = NULL;
    *number = text ? strtoull(text, &end, 10) : 0;
    return text && *text >= '0' && *text <= '9' && *end == '\0';
}

static int find_action(const char *name)
{
    int which = 0;
    while (which < FAULT_ACTION_COUNT && strcmp(action_names[which], name) != 0)
        which++;
    return which;
}

static char *next_word(char **rest)
{
    return strtok_r(NULL, " \t\n", rest);
}

static bool read_actions(char *names, uint32_t *actions)
{
    char *rest = NULL;
    for (char *name = strtok_r(names, ",", &rest); name; name = strtok_r(NULL, ",", &rest)) {
        int which = find_action(name);
        if (which == FAULT_ACTION_COUNT)
            return false;
        *actions |= 1U << which;
    }
    return *actions != 0;
}

/* The words after "seed". */
static bool read_seed(char **rest, struct fault_rule *rule)
{
    *rule = (struct fault_rule){.draws = true, .direction = ANY_DIRECTION,
                                .percent = DEFAULT_PERCENT, .actions = default_actions};
    if (!read_number(next_word(rest), &rule->seed))
        return false;
    char *word = next_word(rest);
    if (word && !strcmp(word, "rate")) {
        uint64_t percent;
        if (!read_number(next_word(rest), &percent) || percent > 100)
            return false;
        rule->percent = (uint32_t)percent;
        word = next_word(rest);
    }
    if (!word)
        return true;
    rule->actions = 0;
    return read_actions(word, &rule->actions) && !next_word(rest);
}

static bool read_rule(char *text, struct fault_rule *rule)
{
    char *rest = NULL;
    char *direction = strtok_r(text, " \t\n", &rest);
    if (direction && !strcmp(direction, "seed"))
        return read_seed(&rest, rule);
    char *at = next_word(&rest);
    char *action = next_word(&rest);
    char *number = next_word(&rest);
    if (!direction || !at || !action || next_word(&rest))
        return false;
    *rule = (struct fault_rule){
        .direction = !strcmp(direction, "read") ? 0 : !strcmp(direction, "write") ? 1
                   : !strcmp(direction, "any") ? ANY_DIRECTION : -1};
    int which = find_action(action);
    if (rule->direction < 0 || which == FAULT_ACTION_COUNT)
        return false;
    if (strcmp(at, "*") != 0 && (!read_number(at, &rule->at) || rule->at == 0))
        return false;
    rule->fate.action = (enum fault_action)which;
    if (!action_takes_number[which])
        return !number;
    bool is_number = read_number(number, &rule->fate.number);
    rule->fate.delay_ns = (int64_t)rule->fate.number * NS_PER_MS;
    /* A refusal without an error would be none. */
    bool is_errno = which == FAULT_REFUSE || which == FAULT_ERRNO;
    bool is_fitting = !is_errno || (rule->fate.number > 0 && rule->fate.number < 4096);
    return is_number && is_fitting;
}

int fault_script_parse(const char *text, struct fault_script *script)
{
    memset(script, 0, sizeof *script);
    char *copy = strdup(text ? text : "");
    if (!copy)
        return -ENOMEM;
    int rc = 0;
    char *rest = NULL;
    for (char *part = strtok_r(copy, ";", &rest); part; part = strtok_r(NULL, ";", &rest)) {
        if (part[strspn(part, " \t\n")] == '\0')
            continue;
        if (script->rule_count == FAULT_RULE_LIMIT
            || !read_rule(part, &script->rules[script->rule_count++]))
            rc = -EINVAL;
    }
    free(copy);
    return rc;
}

/* --- drawing ----------------------------------------------------------------------------------- */

/* Numbers that look random, the same for the same state: Weyl steps, scrambled. */
static uint64_t draw(uint64_t *state, uint64_t limit)
{
    uint64_t mixed = *state += 0x9E3779B97F4A7C15;
    mixed = (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93;
    mixed = (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93;
    mixed ^= mixed >> 32;
    return limit > 0 ? mixed % limit : mixed;
}

static enum fault_action draw_action(uint64_t *state, uint32_t actions)
{
    uint64_t skip_count = draw(state, (uint64_t)__builtin_popcount(actions));
    while (skip_count-- > 0)
        actions &= actions - 1;
    return (enum fault_action)__builtin_ctz(actions);
}

/* Of four, one without progress, two at any byte and one at a page. */
static uint64_t draw_short(uint64_t *state, uint32_t nbytes)
{
    uint64_t kind = draw(state, 4);
    uint64_t moved_nbytes = draw(state, nbytes);
    return kind == 0 ? 0 : kind == 1 ? moved_nbytes & ~4095ULL : moved_nbytes;
}

static uint64_t draw_errno(uint64_t *state, int direction)
{
    static const int numbers[] = {EINTR, EAGAIN, EINVAL, EIO, ENOSPC};
    /* No read is refused for want of space. */
    return (uint64_t)numbers[draw(state, direction == 1 ? 5 : 4)];
}

static bool draw_fate(const struct fault_rule *rule, uint64_t block_number, int direction,
                      uint32_t nbytes, struct fate *fate)
{
    uint64_t state = rule->seed;
    state = draw(&state, 0) + block_number;
    if (draw(&state, 100) >= rule->percent)
        return false;
    fate->action = draw_action(&state, rule->actions);
    fate->number = 0;
    if (fate->action == FAULT_SHORT)
        fate->number = draw_short(&state, nbytes);
    if (fate->action == FAULT_ERRNO || fate->action == FAULT_REFUSE)
        fate->number = draw_errno(&state, direction);
    if (fate->action == FAULT_DELAY)
        fate->delay_ns = (int64_t)draw(&state, DRAWN_DELAY_LIMIT_NS);
    if (fate->action == FAULT_LATE)
        fate->number = 1 + draw(&state, DRAWN_LATE_LIMIT);
    return true;
}

bool fault_script_next(struct fault_script *script, int direction, uint32_t nbytes,
                       struct fate *fate)
{
    uint64_t number = ++script->counts[direction];
    uint64_t any_number = script->counts[0] + script->counts[1];
    bool found = false;
    for (int i = 0; i < script->rule_count && !found; i++) {
        const struct fault_rule *rule = &script->rules[i];
        uint64_t seen = rule->direction == ANY_DIRECTION ? any_number : number;
        if (rule->draws) {
            found = draw_fate(rule, any_number, direction, nbytes, fate);
        } else if ((rule->direction == ANY_DIRECTION || rule->direction == direction)
                   && (rule->at == 0 || rule->at == seen)) {
            *fate = rule->fate;
            found = true;
        }
    }
    fate->generation = script->generation;
    return found;
}

void fault_script_uncount(struct fault_script *script, int direction)
{
    if (script->counts[direction] > 0)
        script->counts[direction]--;
}
