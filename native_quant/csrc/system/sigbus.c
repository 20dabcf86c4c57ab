/* A page of a mapped file that cannot be read (truncated meanwhile, or an I/O error) is a SIGBUS. The process ends with
 * a sentence that names the file; or, where nobody asked for that and the mapping permits it, zeros take the place of
 * the page and of all behind it, the thread goes on, and whoever it computes for asks ktq_lost. The handler reads
 * memory, writes to stderr, exits and maps: async-signal-safe. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "ktq.h"

enum { MAPPINGS = 1024, NAME_BYTES = 512, SENTENCE_BYTES = 512 };

/* A slot is in use while its length is not 0; the length is written last, so the handler never sees half an entry.
 * whole: how many bytes at its beginning are those of the file. */
typedef struct {
    const char *address;
    _Atomic size_t length, whole;
    int may_lose;
    char name[NAME_BYTES];
} mapping;

/* Blocks are added and never freed: the handler walks them at any time. */
typedef struct block {
    mapping mapping[MAPPINGS];
    struct block *_Atomic next;
} block;
static block first;
static pthread_mutex_t registry = PTHREAD_MUTEX_INITIALIZER;

static struct sigaction before;
static char opening[SENTENCE_BYTES], closing[SENTENCE_BYTES];
static int exit_code;
static atomic_int ends_process; /* there is a sentence */
static atomic_int losses;
static size_t page_bytes;
static int installed;

static void print_message(const char *text) {
    for (size_t left = strlen(text); left;) {
        ssize_t done = write(STDERR_FILENO, text, left);
        if (done <= 0) return;
        text += done, left -= (size_t)done;
    }
}

static atomic_flag reported = ATOMIC_FLAG_INIT;

/* The mapping that holds an address, or NULL. */
static mapping *mapping_at(const char *address) {
    for (block *one = &first; one; one = atomic_load(&one->next))
        for (int i = 0; i < MAPPINGS; i++) {
            mapping *candidate = &one->mapping[i];
            size_t length = atomic_load(&candidate->length);
            if (length && address >= candidate->address && (size_t)(address - candidate->address) < length)
                return candidate;
        }
    return NULL;
}

/* Zeros from the page at an address to the end of its mapping. 0: impossible. */
static int map_zeros(mapping *ours, const char *address) {
    int error = errno;
    size_t at = (size_t)(address - ours->address) / page_bytes * page_bytes, whole = atomic_load(&ours->whole);
    void *from = (void *)(uintptr_t)(ours->address + at);
    void *zeros = mmap(from, atomic_load(&ours->length) - at, PROT_READ,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    errno = error;
    if (zeros == MAP_FAILED) return 0;
    while (at < whole && !atomic_compare_exchange_weak(&ours->whole, &whole, at)) {}
    atomic_store(&losses, 1);
    return 1;
}

static void on_sigbus(int number, siginfo_t *info, void *context) {
    int is_fault = info->si_code > 0; /* otherwise a process sent it, and there is no address */
    mapping *ours = is_fault ? mapping_at(info->si_addr) : NULL;
    if (ours && !atomic_load(&ends_process)) {
        if (ours->may_lose && map_zeros(ours, info->si_addr)) return;
        ours = NULL;
    }
    if (ours) {
        if (atomic_flag_test_and_set(&reported))
            for (;;) pause(); /* another thread reports it and ends the process */
        print_message(opening);
        print_message(ours->name);
        print_message(closing);
        _exit(exit_code);
    }
    if (before.sa_handler == SIG_DFL || (before.sa_handler == SIG_IGN && is_fault)) { /* it ends the process: */
        signal(number, SIG_DFL);
        if (!is_fault) raise(number); /* when we return; a fault comes again by itself */
    } else if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(number, info, context);
    } else if (before.sa_handler != SIG_IGN) {
        before.sa_handler(number);
    }
}

static int copy_text(char *to, size_t size, const char *from, size_t length) {
    if (length >= size) return 0;
    memcpy(to, from, length);
    to[length] = 0;
    return 1;
}

/* Under the lock of the registry. */
static int install(void) {
    struct sigaction ours = {.sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO};
    sigemptyset(&ours.sa_mask);
    page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    if (!installed && sigaction(SIGBUS, &ours, &before) != 0) return KTQ_ESYSTEM;
    installed = 1;
    return KTQ_OK;
}

int ktq_guard_sigbus(const char *sentence, int code) {
    const char *place = sentence ? strstr(sentence, "%s") : NULL;
    if (!place) return KTQ_EINVAL;
    int error = KTQ_EINVAL;
    pthread_mutex_lock(&registry);
    if (copy_text(opening, sizeof opening, sentence, (size_t)(place - sentence)) &&
        copy_text(closing, sizeof closing, place + 2, strlen(place + 2))) {
        exit_code = code;
        error = install();
        if (!error) atomic_store(&ends_process, 1);
    }
    pthread_mutex_unlock(&registry);
    return error;
}

/* The slot whose mapping begins at an address; NULL: one that is free. Adds a block if there is none. NULL: no such
 * slot, no memory. */
static mapping *slot_of(const char *address) {
    for (block *one = &first; one; one = atomic_load(&one->next)) {
        for (int i = 0; i < MAPPINGS; i++) {
            mapping *slot = &one->mapping[i];
            int is_used = atomic_load(&slot->length) != 0;
            if (address ? is_used && slot->address == address : !is_used) return slot;
        }
        if (!address && !atomic_load(&one->next)) atomic_store(&one->next, calloc(1, sizeof *one));
    }
    return NULL;
}

int ktq_register_mapping(const void *address, size_t length, const char *name, int may_lose) {
    if (!address || !length || !name) return KTQ_EINVAL;
    pthread_mutex_lock(&registry);
    int error = may_lose ? install() : KTQ_OK;
    mapping *slot = error ? NULL : slot_of(NULL);
    if (slot) {
        size_t bytes = strlen(name);
        const char *tail =
            bytes < NAME_BYTES ? name : name + bytes - (NAME_BYTES - 1); /* the end of a long path says more */
        memcpy(slot->name, tail, strlen(tail) + 1);
        slot->address = address;
        slot->may_lose = may_lose;
        atomic_store(&slot->whole, length);
        atomic_store(&slot->length, length);
    }
    pthread_mutex_unlock(&registry);
    return slot || error ? error : KTQ_ENOMEM;
}

const char *ktq_lost(const void *address, size_t length) {
    if (!atomic_load(&losses) || !address) return NULL;
    const mapping *ours = mapping_at(address);
    size_t end = ours ? (size_t)((const char *)address - ours->address) + length : 0;
    return ours && end > atomic_load(&ours->whole) ? ours->name : NULL;
}

int ktq_any_lost(void) {
    return atomic_load(&losses);
}

int ktq_unregister_mapping(const void *address) {
    if (!address) return KTQ_EINVAL;
    pthread_mutex_lock(&registry);
    mapping *slot = slot_of(address);
    if (slot) atomic_store(&slot->length, 0);
    pthread_mutex_unlock(&registry);
    return slot ? KTQ_OK : KTQ_EINVAL;
}
