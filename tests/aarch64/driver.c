// Runs the CPU kernels inside an emulated aarch64: reads calls from standard input, writes results to standard output.
//
// A call is: name length and name; number of integer-class arguments, each a tag and an int64, or a tag, a size and the
// bytes of a buffer; number of floating arguments, 8 bytes each. A result is the int64 returned, then every buffer.
// The procedure call standard of aarch64 numbers integer and floating arguments apart and gives each stacked one eight
// bytes, so one function type serves them all: arguments a callee does not have are not looked at.
#include "isobit_cpu.c"

#include <stdio.h>
#include <stdlib.h>

#define MAX_INTEGERS 20
#define MAX_FLOATS 4

typedef int64_t (*any_function)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                                int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                                int64_t, int64_t, double, double, double, double);

#define ENTRY(name) {#name, (any_function)(void *)name}
static const struct {
    const char *name;
    any_function function;
} functions[] = {
    ENTRY(isobit_packed_bytes), ENTRY(isobit_pack_linear), ENTRY(isobit_embedding), ENTRY(isobit_linear),
    ENTRY(isobit_linear_schedules), ENTRY(isobit_rms_norm), ENTRY(isobit_silu_mul), ENTRY(isobit_rope_and_cache),
    ENTRY(isobit_attention), ENTRY(isobit_argmax), ENTRY(isobit_logprobs), ENTRY(isobit_top_logits),
    ENTRY(isobit_sample),
};

static void receive(void *to, size_t size) {
    if (fread(to, 1, size, stdin) != size) {
        exit(0);  // the test closed the pipe
    }
}

static int64_t receive_word(void) {
    int64_t word;
    receive(&word, sizeof word);
    return word;
}

static any_function find(const char *name) {
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        if (strcmp(functions[i].name, name) == 0) {
            return functions[i].function;
        }
    }
    fprintf(stderr, "no function %s\n", name);
    exit(1);
}

int main(void) {
    for (;;) {
        char name[64] = {0};
        int64_t a[MAX_INTEGERS] = {0}, sizes[MAX_INTEGERS] = {0};
        double f[MAX_FLOATS] = {0};
        receive(name, (size_t)receive_word());
        int64_t num_integers = receive_word();
        for (int64_t i = 0; i < num_integers; i++) {
            if (receive_word() == 0) {
                a[i] = receive_word();
                continue;
            }
            sizes[i] = receive_word();
            void *buffer = aligned_alloc(64, ((size_t)sizes[i] + 127) / 64 * 64);
            receive(buffer, (size_t)sizes[i]);
            a[i] = (int64_t)(intptr_t)buffer;
        }
        receive(f, (size_t)receive_word() * sizeof *f);
        int64_t result = find(name)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13],
                                    a[14], a[15], a[16], a[17], a[18], a[19], f[0], f[1], f[2], f[3]);
        fwrite(&result, sizeof result, 1, stdout);
        for (int64_t i = 0; i < num_integers; i++) {
            if (sizes[i] > 0) {
                fwrite((void *)(intptr_t)a[i], 1, (size_t)sizes[i], stdout);
                free((void *)(intptr_t)a[i]);
            }
        }
        fflush(stdout);
    }
}
