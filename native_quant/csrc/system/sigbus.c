/* Handler of SIGBUS, which a page of a mapped file raises that cannot be read (the file was truncated, or an I/O error
 * occurred). After ktq_guard_sigbus the process prints a sentence that names the file, and exits. Otherwise, if the
 * mapping permits it, the page and all pages after it become zeros, the thread continues, and the caller asks ktq_lost
 * afterwards. The handler only reads memory, writes to stderr, maps and exits, which is async-signal-safe. */
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

/* A slot is in use while its length is not 0. The length is written last, so that the handler never sees a partial
 * entry. whole: number of bytes at the beginning that still are those of the file. */
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
static atomic_int ends_process; /* ktq_guard_sigbus has set the sentence */
static atomic_int losses;
static size_t page_bytes;
static int installed;

static void print_message(const char *text) {
    for (size_t remaining = strlen(text); remaining;) {
        ssize_t done = write(STDERR_FILENO, text, remaining);
        if (done <= 0) return;
        text += done, remaining -= (size_t)done;
    }
}

static atomic_flag reported = ATOMIC_FLAG_INIT;

/* The mapping that holds an address, or NULL. */
static mapping *find_mapping(const char *address) {
    for (block *block = &first; block; block = atomic_load(&block->next))
        for (int i = 0; i < MAPPINGS; i++) {
            mapping *candidate = &block->mapping[i];
            size_t length = atomic_load(&candidate->length);
            if (length && address >= candidate->address && (size_t)(address - candidate->address) < length)
                return candidate;
        }
    return NULL;
}

/* Replaces the pages from an address to the end of its mapping by zeros. Returns 0 if that fails. */
static int map_zeros(mapping *mapping, const char *address) {
    int error = errno;
    size_t at = (size_t)(address - mapping->address) / page_bytes * page_bytes, whole = atomic_load(&mapping->whole);
    void *from = (void *)(uintptr_t)(mapping->address + at);
    void *zeros = mmap(from, atomic_load(&mapping->length) - at, PROT_READ,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    errno = error;
    if (zeros == MAP_FAILED) return 0;
    while (at < whole && !atomic_compare_exchange_weak(&mapping->whole, &whole, at)) {}
    atomic_store(&losses, 1);
    return 1;
}

static void on_sigbus(int number, siginfo_t *info, void *context) {
    int is_fault = info->si_code > 0; /* otherwise a process sent the signal, and there is no address */
    mapping *mapping = is_fault ? find_mapping(info->si_addr) : NULL;
    if (mapping && !atomic_load(&ends_process)) {
        if (mapping->may_lose && map_zeros(mapping, info->si_addr)) return;
        mapping = NULL;
    }
    if (mapping) {
        if (atomic_flag_test_and_set(&reported))
            for (;;) pause(); /* another thread reports it and ends the process */
        print_message(opening);
        print_message(mapping->name);
        print_message(closing);
        _exit(exit_code);
    }
    if (before.sa_handler == SIG_DFL || (before.sa_handler == SIG_IGN && is_fault)) {
        /* The signal ends the process when the handler returns: a fault repeats by itself. */
        signal(number, SIG_DFL);
        if (!is_fault) raise(number);
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

/* Call it with the registry's lock held. */
static int install(void) {
    struct sigaction action = {.sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO};
    sigemptyset(&action.sa_mask);
    page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    if (!installed && sigaction(SIGBUS, &action, &before) != 0) return KTQ_ESYSTEM;
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

/* Returns the slot whose mapping begins at an address, or NULL. Address NULL: returns a free slot, in a new block if
 * necessary, or NULL if memory is exhausted. */
static mapping *find_slot(const char *address) {
    for (block *block = &first; block; block = atomic_load(&block->next)) {
        for (int i = 0; i < MAPPINGS; i++) {
            mapping *slot = &block->mapping[i];
            int is_used = atomic_load(&slot->length) != 0;
            if (address ? is_used && slot->address == address : !is_used) return slot;
        }
        if (!address && !atomic_load(&block->next)) atomic_store(&block->next, calloc(1, sizeof *block));
    }
    return NULL;
}

int ktq_register_mapping(const void *address, size_t length, const char *name, int may_lose) {
    if (!address || !length || !name) return KTQ_EINVAL;
    pthread_mutex_lock(&registry);
    int error = may_lose ? install() : KTQ_OK;
    mapping *slot = error ? NULL : find_slot(NULL);
    if (slot) {
        size_t bytes = strlen(name);
        const char *tail =
            bytes < NAME_BYTES
                ? name
                : name + bytes - (NAME_BYTES - 1); /* of a long path, the end identifies the file better */
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
    const mapping *mapping = find_mapping(address);
    size_t end = mapping ? (size_t)((const char *)address - mapping->address) + length : 0;
    return mapping && end > atomic_load(&mapping->whole) ? mapping->name : NULL;
}

int ktq_any_lost(void) {
    return atomic_load(&losses);
}

int ktq_unregister_mapping(const void *address) {
    if (!address) return KTQ_EINVAL;
    pthread_mutex_lock(&registry);
    mapping *slot = find_slot(address);
    if (slot) atomic_store(&slot->length, 0);
    pthread_mutex_unlock(&registry);
    return slot ? KTQ_OK : KTQ_EINVAL;
}
