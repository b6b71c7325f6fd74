// Reads `bytes` at `data` with `threads` threads, each its own contiguous part, `rounds` times; returns the seconds of
// the fastest round. What memory can give at most: a weight is read once a token.
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

typedef uint64_t Vector __attribute__((vector_size(64)));
typedef struct {
  const char* data;
  size_t bytes;
  Vector sum;
} Part;

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

static void* read_part(void* argument) {
  Part* part = argument;
  Vector a = {0}, b = {0};
  for (size_t i = 0; i + 128 <= part->bytes; i += 128) {
    __builtin_prefetch(part->data + i + 4096);
    __builtin_prefetch(part->data + i + 4160);
    a ^= *(const Vector*)(part->data + i);
    b ^= *(const Vector*)(part->data + i + 64);
  }
  part->sum = a ^ b;
  return NULL;
}

double stream_seconds(const char* data, size_t bytes, int threads, int rounds) {
  enum { kMost = 256 };
  Part parts[kMost];
  pthread_t ids[kMost];
  double best = 1e9;
  const size_t each = bytes / threads / 128 * 128;
  for (int r = 0; r < rounds; ++r) {
    const double start = now();
    for (int t = 0; t < threads; ++t) parts[t] = (Part){data + each * t, each, {0}};
    for (int t = 1; t < threads; ++t) pthread_create(&ids[t], NULL, read_part, &parts[t]);
    read_part(&parts[0]);
    for (int t = 1; t < threads; ++t) pthread_join(ids[t], NULL);
    const double seconds = now() - start;
    best = seconds < best ? seconds : best;
  }
  return best;
}
