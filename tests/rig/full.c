/* An LD_PRELOAD shim for a disk that fills up: from the N-th call on, whatever needs room fails with ENOSPC.
 *
 *   FULL_ROOT  a call counts if the path it needs room for begins with this text
 *   FULL_N     the first call that fails, from 1; 0 or unset: none
 *   FULL_LOG   the number of counted calls is written here at the end, with FULL_N 0
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static atomic_long counted;

static int full(const char *path) {
    const char *root = getenv("FULL_ROOT"), *first = getenv("FULL_N");
    if (!root || !path || strncmp(path, root, strlen(root)) != 0) return 0;
    long number = atomic_fetch_add(&counted, 1) + 1, from = first ? atol(first) : 0;
    if (from > 0 && number >= from) {
        errno = ENOSPC;
        return 1;
    }
    const char *log = getenv("FULL_LOG");
    FILE *file = log ? fopen(log, "w") : NULL;
    if (file) {
        fprintf(file, "%ld\n", number);
        fclose(file);
    }
    return 0;
}

static int full_fd(int fd) {
    char link[48], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    path[n > 0 ? n : 0] = 0;
    return full(path);
}

#define NEXT(result, name, parameters) ((result(*) parameters)dlsym(RTLD_NEXT, #name))

#define OPEN(name)                                                                   \
    int name(const char *file, int flags, ...) {                                     \
        va_list rest;                                                                \
        va_start(rest, flags);                                                       \
        mode_t mode = flags & O_CREAT ? va_arg(rest, mode_t) : 0;                    \
        va_end(rest);                                                                \
        if ((flags & O_CREAT) && access(file, F_OK) != 0 && full(file)) return -1;   \
        return NEXT(int, name, (const char *, int, ...))(file, flags, mode);         \
    }
OPEN(open)
OPEN(open64)

#define ON_FD(result, name, parameters, arguments, failure)  \
    result name parameters {                                 \
        if (full_fd(fd)) return failure;                     \
        return NEXT(result, name, parameters) arguments;     \
    }
ON_FD(ssize_t, write, (int fd, const void *data, size_t size), (fd, data, size), -1)
ON_FD(ssize_t, pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at), -1)
ON_FD(ssize_t, pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at), -1)
ON_FD(int, posix_fallocate, (int fd, off_t at, off_t size), (fd, at, size), ENOSPC)
ON_FD(int, posix_fallocate64, (int fd, off64_t at, off64_t size), (fd, at, size), ENOSPC)
ON_FD(int, fsync, (int fd), (fd), -1)
ON_FD(int, syncfs, (int fd), (fd), -1)

#define ON_NAME(name, parameters, arguments, path)           \
    int name parameters {                                    \
        if (full(path)) return -1;                           \
        return NEXT(int, name, parameters) arguments;        \
    }
ON_NAME(mkdir, (const char *file, mode_t mode), (file, mode), file)
ON_NAME(link, (const char *from, const char *to), (from, to), to)
ON_NAME(rename, (const char *from, const char *to), (from, to), to)
