// Memory that a thread keeps between calls, so that the kernels do not allocate on every step.
//
// It does not know what is stored in it. Invariant: a buffer belongs to one thread, is aligned to 64 bytes, holds
// garbage when it is reserved, and is freed when the thread ends.
#ifndef ISOBIT_SCRATCH_H
#define ISOBIT_SCRATCH_H

#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>

// Buffers of a thread: two for what a call shares with its items, one for what an item keeps to itself (the caller of
// parallel_for works on items too).
enum { SCRATCH_CALL, SCRATCH_SHARED, SCRATCH_ITEM, NUM_SCRATCH };

static struct {
    pthread_key_t key;
    pthread_once_t once;
} scratch_owner = {.once = PTHREAD_ONCE_INIT};

static _Thread_local struct scratch {
    void *data;
    size_t size;
} scratch_of_thread[NUM_SCRATCH];

static void scratch_free(void *buffers) {
    struct scratch *scratch = buffers;
    for (int which = 0; which < NUM_SCRATCH; which++) {
        free(scratch[which].data);
        scratch[which] = (struct scratch){NULL, 0};
    }
}

static void scratch_create_key(void) { pthread_key_create(&scratch_owner.key, scratch_free); }

// At least `size` bytes, valid until this thread reserves the same buffer again; NULL when there is no memory.
static void *scratch_reserve(int which, size_t size) {
    struct scratch *scratch = &scratch_of_thread[which];
    if (scratch->size < size) {
        size_t rounded = (size + size / 4 + 4096) / 4096 * 4096;
        pthread_once(&scratch_owner.once, scratch_create_key);
        pthread_setspecific(scratch_owner.key, scratch_of_thread);
        free(scratch->data);
        scratch->data = aligned_alloc(64, rounded);
        scratch->size = scratch->data ? rounded : 0;
    }
    return scratch->data;
}

#endif
