/* Writes down what a process asks of the files in one folder, for tests/vault_power.py.
 *
 * LD_PRELOAD this; POWER_FOLDER is the folder, POWER_LOG the file for the log. One line an event:
 *   open FD CREATED TRUNCATED PATH | write FD OFFSET HEX | cut FD SIZE | sync FD | close FD
 *   name FROM TO | gone PATH
 * Paths are relative to the folder; the folder itself is ".". The process has one thread.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static int watched[4096];
static FILE *out;
static int busy;

#define REAL(name) \
  static __typeof__(&name) real; \
  if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static FILE *log_file(void) {
  if (!out && getenv("POWER_LOG")) {
    busy = 1;
    out = fopen(getenv("POWER_LOG"), "ae");
    busy = 0;
  }
  return out;
}

/* The path inside the folder, or NULL. */
static const char *inside(const char *path) {
  const char *folder = getenv("POWER_FOLDER");
  size_t size = folder ? strlen(folder) : 0;
  if (busy || !size || !path || strncmp(path, folder, size)) return NULL;
  if (path[size] == 0) return ".";
  return path[size] == '/' ? path + size + 1 : NULL;
}

static int is_watched(int fd) { return !busy && fd >= 0 && fd < 4096 && watched[fd]; }

static int opened(const char *path, int flags, int fd, int created) {
  const char *name = inside(path);
  if (name && fd >= 0 && fd < 4096 && log_file()) {
    watched[fd] = 1;
    fprintf(out, "open %d %d %d %s\n", fd, created, !!(flags & O_TRUNC), name);
    fflush(out);
  }
  return fd;
}

#define OPEN(name) \
  int name(const char *path, int flags, ...) { \
    mode_t mode = 0; \
    if (flags & O_CREAT) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); } \
    REAL(name); \
    int created = inside(path) && (flags & O_CREAT) && access(path, F_OK) != 0; \
    return opened(path, flags, real(path, flags, mode), created); \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
  int name(int folder, const char *path, int flags, ...) { \
    mode_t mode = 0; \
    if (flags & O_CREAT) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); } \
    REAL(name); \
    int created = inside(path) && (flags & O_CREAT) && access(path, F_OK) != 0; \
    return opened(path, flags, real(folder, path, flags, mode), created); \
  }
OPENAT(openat)
OPENAT(openat64)

static void wrote(int fd, const unsigned char *bytes, ssize_t size, long long offset) {
  if (size <= 0 || !log_file()) return;
  fprintf(out, "write %d %lld ", fd, offset);
  for (ssize_t i = 0; i < size; i++) fprintf(out, "%02x", bytes[i]);
  fputc('\n', out);
  fflush(out);
}

ssize_t write(int fd, const void *bytes, size_t size) {
  REAL(write);
  if (!is_watched(fd)) return real(fd, bytes, size);
  long long offset = lseek(fd, 0, SEEK_CUR);
  ssize_t done = real(fd, bytes, size);
  wrote(fd, bytes, done, offset);
  return done;
}

#define PWRITE(name, kind) \
  ssize_t name(int fd, const void *bytes, size_t size, kind offset) { \
    REAL(name); \
    ssize_t done = real(fd, bytes, size, offset); \
    if (is_watched(fd)) wrote(fd, bytes, done, offset); \
    return done; \
  }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

#define TRUNCATE(name, kind) \
  int name(int fd, kind size) { \
    REAL(name); \
    int done = real(fd, size); \
    if (is_watched(fd) && done == 0 && log_file()) { fprintf(out, "cut %d %lld\n", fd, (long long)size); fflush(out); } \
    return done; \
  }
TRUNCATE(ftruncate, off_t)
TRUNCATE(ftruncate64, off64_t)

#define SYNC(name) \
  int name(int fd) { \
    REAL(name); \
    int done = real(fd); \
    if (is_watched(fd) && done == 0 && log_file()) { fprintf(out, "sync %d\n", fd); fflush(out); } \
    return done; \
  }
SYNC(fsync)
SYNC(fdatasync)

int close(int fd) {
  REAL(close);
  if (is_watched(fd) && log_file()) { watched[fd] = 0; fprintf(out, "close %d\n", fd); fflush(out); }
  return real(fd);
}

int rename(const char *from, const char *to) {
  REAL(rename);
  int done = real(from, to);
  if (done == 0 && inside(from) && inside(to) && log_file()) { fprintf(out, "name %s %s\n", inside(from), inside(to)); fflush(out); }
  return done;
}

int unlink(const char *path) {
  REAL(unlink);
  int done = real(path);
  if (done == 0 && inside(path) && log_file()) { fprintf(out, "gone %s\n", inside(path)); fflush(out); }
  return done;
}
