// The thread pool: parallel_for over independent items, and the floating-point environment every kernel runs in.
//
// It does not know what an item computes, and which thread takes which item is left to chance: an item must therefore
// write its own outputs only. Invariant: every body runs with FTZ + DAZ set, in the caller and in the workers, and the
// caller's environment is restored.
//
// A job is offered through one atomic word, the gate. Workers that are awake join by compare-and-swap and take items
// from a shared counter; the caller takes items too, then closes the gate and waits for those who joined. A worker that
// the system does not schedule never joins and so never delays anybody. Between jobs a worker spins for a few tens of
// microseconds, then sleeps.
#ifndef ISOBIT_POOL_H
#define ISOBIT_POOL_H

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <time.h>
#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#endif

#define MAX_THREADS 64

// ---- floating-point environment

#if defined(__x86_64__) || defined(__i386__)
typedef unsigned fp_environment;
#define FP_FLUSH 0x8040u  // MXCSR: flush results to zero (bit 15), read denormals as zero (bit 6)
static inline fp_environment fp_get(void) { return _mm_getcsr(); }
static inline void fp_set(fp_environment environment) { _mm_setcsr(environment); }
static inline void cpu_relax(void) { _mm_pause(); }
#elif defined(__aarch64__)
typedef uint64_t fp_environment;
#define FP_FLUSH (1ull << 24)  // FPCR.FZ: both, operands and results
static inline fp_environment fp_get(void) {
    uint64_t environment;
    __asm__ volatile("mrs %0, fpcr" : "=r"(environment));
    return environment;
}
static inline void fp_set(fp_environment environment) { __asm__ volatile("msr fpcr, %0" : : "r"(environment)); }
static inline void cpu_relax(void) { __asm__ volatile("yield"); }
#else
#error "isobit's CPU kernels support x86-64 and aarch64"
#endif

static inline fp_environment fp_enter(void) {
    fp_environment saved = fp_get();
    fp_set(saved | FP_FLUSH);
    return saved;
}

static inline void fp_leave(fp_environment saved) { fp_set(saved); }

// ---- the pool

// The gate: bits 0..15 workers inside, bits 16..30 seats left, bit 31 open, bits 32..63 number of the job.
#define GATE_INSIDE 0xffffull
#define GATE_SEAT (1ull << 16)
#define GATE_SEATS (0x7fffull << 16)
#define GATE_OPEN (1ull << 31)
#define GATE_JOB (1ull << 32)
#define SPIN_NANOSECONDS 30000

typedef void (*parallel_body)(int64_t item, void *arg);

static struct {
    _Atomic uint64_t gate;
    _Atomic int64_t remaining;  // items nobody has taken yet; below zero once they are gone
    _Atomic int sleepers;       // workers waiting for `wake`
    _Atomic bool caller_waits;  // the caller sleeps until the last worker is out
    int64_t num_items;          // these three are written only while the gate is closed and nobody is inside
    parallel_body body;
    void *arg;
    int num_workers;         // guarded by `one_job`, as is the whole job
    pthread_mutex_t one_job;  // held by the caller from opening to closing
    pthread_mutex_t sleep;
    pthread_cond_t wake, done;
} pool = {
    .one_job = PTHREAD_MUTEX_INITIALIZER,
    .sleep = PTHREAD_MUTEX_INITIALIZER,
    .wake = PTHREAD_COND_INITIALIZER,
    .done = PTHREAD_COND_INITIALIZER,
};

static int64_t pool_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void pool_take_items(void) {
    for (;;) {
        int64_t left = atomic_fetch_sub_explicit(&pool.remaining, 1, memory_order_relaxed);
        if (left <= 0) {
            return;
        }
        pool.body(pool.num_items - left, pool.arg);
    }
}

static bool pool_wants_help(uint64_t gate) {
    return (gate & GATE_OPEN) && (gate & GATE_SEATS) &&
           atomic_load_explicit(&pool.remaining, memory_order_relaxed) > 0;
}

// Join the open job, if there is one with a free seat and work left, and help until its items are gone.
static bool pool_help(void) {
    uint64_t gate = atomic_load_explicit(&pool.gate, memory_order_acquire);
    do {
        if (!pool_wants_help(gate)) {
            return false;
        }
    } while (!atomic_compare_exchange_weak_explicit(&pool.gate, &gate, gate - GATE_SEAT + 1, memory_order_acq_rel,
                                                    memory_order_acquire));
    pool_take_items();
    uint64_t before = atomic_fetch_sub(&pool.gate, 1);
    if ((before & GATE_INSIDE) == 1 && atomic_load(&pool.caller_waits)) {
        pthread_mutex_lock(&pool.sleep);
        pthread_cond_signal(&pool.done);
        pthread_mutex_unlock(&pool.sleep);
    }
    return true;
}

static void pool_sleep(void) {
    pthread_mutex_lock(&pool.sleep);
    atomic_fetch_add(&pool.sleepers, 1);  // before the gate is read: the caller opens the gate, then reads sleepers
    while (!pool_wants_help(atomic_load(&pool.gate))) {
        pthread_cond_wait(&pool.wake, &pool.sleep);
    }
    atomic_fetch_sub(&pool.sleepers, 1);
    pthread_mutex_unlock(&pool.sleep);
}

static void *pool_worker(void *unused) {
    (void)unused;
    fp_set(fp_get() | FP_FLUSH);
    for (;;) {
        int64_t deadline = pool_now() + SPIN_NANOSECONDS;
        do {
            for (int i = 0; i < 32; i++) {
                if (pool_help()) {
                    deadline = pool_now() + SPIN_NANOSECONDS;
                }
                cpu_relax();
            }
        } while (pool_now() < deadline);
        pool_sleep();
    }
    return NULL;
}

// In a forked child only the forking thread exists, and another thread may have held any of the locks.
static void pool_after_fork(void) {
    pthread_mutex_init(&pool.one_job, NULL);
    pthread_mutex_init(&pool.sleep, NULL);
    pthread_cond_init(&pool.wake, NULL);
    pthread_cond_init(&pool.done, NULL);
    atomic_store(&pool.gate, 0);
    atomic_store(&pool.sleepers, 0);
    atomic_store(&pool.caller_waits, false);
    pool.num_workers = 0;
}

static void pool_register_fork(void) { pthread_atfork(NULL, NULL, pool_after_fork); }

// Start workers until there are `wanted`; with fewer (the system may refuse) everything still works. They take no
// signals, so that an interrupt reaches the program's own threads.
static void pool_grow(int wanted) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, pool_register_fork);
    sigset_t all, saved;
    pthread_attr_t attributes;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &saved);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 4 << 20);
    pthread_t thread;
    while (pool.num_workers < wanted && pthread_create(&thread, &attributes, pool_worker, NULL) == 0) {
        pool.num_workers++;
    }
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &saved, NULL);
}

static void pool_open(int helpers, int64_t num_items, parallel_body body, void *arg) {
    pool.num_items = num_items;
    pool.body = body;
    pool.arg = arg;
    atomic_store_explicit(&pool.remaining, num_items, memory_order_relaxed);
    uint64_t job = (atomic_load_explicit(&pool.gate, memory_order_relaxed) / GATE_JOB + 1) * GATE_JOB;
    atomic_store(&pool.gate, job | GATE_OPEN | (uint64_t)helpers * GATE_SEAT);
    int sleepers = atomic_load(&pool.sleepers);
    int awake = pool.num_workers - sleepers;
    if (sleepers > 0 && awake < helpers) {
        pthread_mutex_lock(&pool.sleep);
        for (int i = awake; i < helpers; i++) {
            pthread_cond_signal(&pool.wake);
        }
        pthread_mutex_unlock(&pool.sleep);
    }
}

static void pool_close(void) {
    uint64_t gate = atomic_fetch_and(&pool.gate, ~(GATE_OPEN | GATE_SEATS));
    if (!(gate & GATE_INSIDE)) {
        return;
    }
    int64_t deadline = pool_now() + SPIN_NANOSECONDS;
    do {
        for (int i = 0; i < 32; i++) {
            if (!(atomic_load_explicit(&pool.gate, memory_order_acquire) & GATE_INSIDE)) {
                return;
            }
            cpu_relax();
        }
    } while (pool_now() < deadline);
    pthread_mutex_lock(&pool.sleep);
    atomic_store(&pool.caller_waits, true);  // before the gate is read: workers leave the gate, then read this
    while (atomic_load(&pool.gate) & GATE_INSIDE) {
        pthread_cond_wait(&pool.done, &pool.sleep);
    }
    atomic_store(&pool.caller_waits, false);
    pthread_mutex_unlock(&pool.sleep);
}

// Run body(0, arg) .. body(num_items - 1, arg), on at most `num_threads` threads. A second caller (another thread, or a
// body) finds the pool taken and runs its items itself.
static void parallel_for(int num_threads, int64_t num_items, parallel_body body, void *arg) {
    fp_environment saved = fp_enter();
    __asm__ volatile("" : "+r"(body));  // the compiler may not inline the body, and so not move it out of here
    int64_t helpers = (num_threads < MAX_THREADS ? num_threads : MAX_THREADS) - 1;
    helpers = helpers < num_items - 1 ? helpers : num_items - 1;
    if (helpers < 1 || pthread_mutex_trylock(&pool.one_job) != 0) {
        for (int64_t item = 0; item < num_items; item++) {
            body(item, arg);
        }
    } else {
        if (pool.num_workers < helpers) {
            pool_grow((int)helpers);
        }
        pool_open((int)helpers, num_items, body, arg);
        pool_take_items();
        pool_close();
        pthread_mutex_unlock(&pool.one_job);
    }
    fp_leave(saved);
}

#endif
