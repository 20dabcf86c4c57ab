/* A mapped file whose pages cannot be read (truncated meanwhile, or an I/O error) ends the process by SIGBUS. We cannot go on,
 * but we can say which file it was. The handler only reads memory, writes to stderr and exits: async-signal-safe. */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "ktq.h"

enum { MAPPINGS = 4096, NAME_BYTES = 512, SENTENCE_BYTES = 512 };

/* A slot is in use while its length is not 0; the length is written last, so the handler never sees half an entry. */
static struct {
    const char *address;
    _Atomic size_t length;
    char name[NAME_BYTES];
} mappings[MAPPINGS];
static pthread_mutex_t registry = PTHREAD_MUTEX_INITIALIZER;

static struct sigaction before;
static char opening[SENTENCE_BYTES], closing[SENTENCE_BYTES];
static int exit_code;
static int installed;

static void say(const char *text) {
    for (size_t left = strlen(text); left;) {
        ssize_t done = write(STDERR_FILENO, text, left);
        if (done <= 0) return;
        text += done, left -= (size_t)done;
    }
}

static atomic_flag told = ATOMIC_FLAG_INIT;

static void on_sigbus(int number, siginfo_t *info, void *context) {
    (void)context;
    const char *at = info->si_addr;
    for (int i = 0; i < MAPPINGS; i++) {
        size_t length = atomic_load(&mappings[i].length);
        if (!length || at < mappings[i].address || (size_t)(at - mappings[i].address) >= length) continue;
        if (atomic_flag_test_and_set(&told))
            for (;;) pause(); /* another thread is telling it, and ends the process */
        say(opening);
        say(mappings[i].name);
        say(closing);
        _exit(exit_code);
    }
    sigaction(number, &before, NULL); /* not ours: the instruction faults again, and goes where it went before */
}

static int copy_text(char *to, size_t room, const char *from, size_t length) {
    if (length >= room) return 0;
    memcpy(to, from, length);
    to[length] = 0;
    return 1;
}

int ktq_guard_sigbus(const char *sentence, int code) {
    const char *place = sentence ? strstr(sentence, "%s") : NULL;
    if (!place) return KTQ_EINVAL;
    int error = KTQ_OK;
    pthread_mutex_lock(&registry);
    if (!copy_text(opening, sizeof opening, sentence, (size_t)(place - sentence)) ||
        !copy_text(closing, sizeof closing, place + 2, strlen(place + 2))) {
        error = KTQ_EINVAL;
    } else {
        exit_code = code;
        struct sigaction ours = {.sa_sigaction = on_sigbus, .sa_flags = SA_SIGINFO};
        sigemptyset(&ours.sa_mask);
        if (!installed && sigaction(SIGBUS, &ours, &before) != 0) error = KTQ_ESYSTEM;
        if (!error) installed = 1;
    }
    pthread_mutex_unlock(&registry);
    return error;
}

int ktq_register_mapping(const void *address, size_t length, const char *name) {
    if (!address || !length || !name) return KTQ_EINVAL;
    int error = KTQ_EFULL;
    pthread_mutex_lock(&registry);
    for (int i = 0; i < MAPPINGS && error; i++) {
        if (atomic_load(&mappings[i].length)) continue;
        size_t bytes = strlen(name);
        const char *tail = bytes < NAME_BYTES ? name : name + bytes - (NAME_BYTES - 1); /* the end of a long path says more */
        memcpy(mappings[i].name, tail, strlen(tail) + 1);
        mappings[i].address = address;
        atomic_store(&mappings[i].length, length);
        error = KTQ_OK;
    }
    pthread_mutex_unlock(&registry);
    return error;
}

int ktq_unregister_mapping(const void *address) {
    int error = KTQ_EINVAL;
    pthread_mutex_lock(&registry);
    for (int i = 0; i < MAPPINGS && error; i++) {
        if (!atomic_load(&mappings[i].length) || mappings[i].address != address) continue;
        atomic_store(&mappings[i].length, 0);
        error = KTQ_OK;
    }
    pthread_mutex_unlock(&registry);
    return error;
}
