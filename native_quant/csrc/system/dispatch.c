/* The tables made from kernels.def, the choice among them, and the sentences of the errors. */
#include <stdatomic.h>
#include <string.h>

#include "kernels.h"

#define KT_ISA_TEXT(name, contains) #name,
static const char *const names[KT_ISA_COUNT] = {KT_ISAS(KT_ISA_TEXT)};
#undef KT_ISA_TEXT

static const struct {
    const char *family;
    int isa;
} rows[] = {
#define KERNEL(family, isa) {#family, KT_ISA_##isa},
#include "kernels.def"
#define FAMILY(family, type) {#family, KT_ISA_scalar},
#include "kernels.def"
};
enum { ROWS = sizeof rows / sizeof rows[0] };

#define KT_ISA_PARENT(name, contains) KT_ISA_##contains,
static const int contains[KT_ISA_COUNT] = {KT_ISAS(KT_ISA_PARENT)};
#undef KT_ISA_PARENT

/* Whether a CPU with `isa` also has `other`. */
static int contains_isa(int isa, int other) {
    while (isa > other) isa = contains[isa];
    return isa == other;
}

/* tables[isa]: the best kernel of each family that isa includes. Written once, when the library is loaded. */
static kt_kernels tables[KT_ISA_COUNT];
static unsigned available;
static int best;
static atomic_int current;

__attribute__((constructor)) static void choose(void) {
    available = kt_cpu_isas();
    unsigned usable = available & ~kt_cpu_slow_isas();
    for (int isa = 0; isa < KT_ISA_COUNT; isa++) {
        kt_kernels *table = &tables[isa];
#define KERNEL(family, needs) \
    if (!table->family && contains_isa(isa, KT_ISA_##needs)) table->family = kt_##family##_##needs;
#include "kernels.def"
#define FAMILY(family, type) \
    if (!table->family && contains_isa(isa, KT_ISA_scalar)) table->family = kt_##family##_scalar;
#include "kernels.def"
        if (usable >> isa & 1) best = isa;
    }
    atomic_store(&current, best);
}

const kt_kernels *kt_current(void) {
    return &tables[atomic_load_explicit(&current, memory_order_relaxed)];
}

const void *ktq_kernels(void) {
    return kt_current();
}

int ktq_isa_count(void) {
    return KT_ISA_COUNT;
}

const char *ktq_compiler(void) {
#ifdef __clang__
    return "clang " __clang_version__;
#elif defined(__GNUC__)
    return "gcc " __VERSION__;
#else
    return "unknown";
#endif
}

const char *ktq_isa_name(int isa) {
    return isa >= 0 && isa < KT_ISA_COUNT ? names[isa] : NULL;
}

int ktq_isa_available(int isa) {
    return isa >= 0 && isa < KT_ISA_COUNT && (available >> isa & 1);
}

int ktq_isa(void) {
    return atomic_load(&current);
}

int ktq_set_isa(int isa) {
    if (isa == -1) isa = best;
    if (!ktq_isa_available(isa)) return KTQ_EISA;
    atomic_store(&current, isa);
    return KTQ_OK;
}

int ktq_kernel_isa(int row) {
    return row >= 0 && row < ROWS ? rows[row].isa : -1;
}

const char *ktq_kernel_family(int row) {
    return row >= 0 && row < ROWS ? rows[row].family : NULL;
}

const char *ktq_strerror(int error) {
    switch (error) {
    case KTQ_OK: return "no error";
    case KTQ_EINVAL: return "an argument is out of range";
    case KTQ_ESHAPE: return "rows or columns are no whole number of tiles";
    case KTQ_EISA: return "this instruction set is not available here";
    case KTQ_ENONFINITE: return "a value is infinite or not a number";
    case KTQ_ESYSTEM: return "the system refused";
    case KTQ_ENOMEM: return "there is not enough memory";
    case KTQ_ECLOSED: return "the pool of threads was closed";
    case KTQ_EFORK:
        return "the process was forked before this was computed, so only its parent has the result: submit it again";
    case KTQ_ERANGE: return "a code is out of range";
    }
    return "unknown error";
}
