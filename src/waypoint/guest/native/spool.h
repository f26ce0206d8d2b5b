/*
 * A stream of a command's output: the last RING bytes, addressed by their offset in the whole stream, so that a client
 * that lost its connection (every snapshot drops them) goes on exactly where it was.
 */
#ifndef SPOOL_H
#define SPOOL_H
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define RING (256u << 10)
#define FIRST_SIZE 64u

/*
 * For what is read here and copied on at once; nothing in it outlives the call. One for all, and on pages of its own, because every page
 * of init that was ever touched is in every snapshot, until `quiesce` gives these back.
 */
static char scratch[64 << 10] __attribute__((aligned(4096)));

struct spool {
	int fd;			/* read end; -1 when ended */
	unsigned size;		/* of `ring`, which grows with what it holds up to RING; a byte's place is its offset modulo RING all along */
	char *ring;
	uint64_t start, end;	/* offsets of the oldest byte kept and of the next one */
};

static size_t spool_room(const struct spool *s, uint64_t consumer) { return RING - (size_t)(s->end - consumer); }

static void spool_resize(struct spool *s, unsigned size)
{
	char *ring = realloc(s->ring, size);

	if (!ring)
		_exit(70);
	s->ring = ring;
	s->size = size;
}

/* No more will come: keep no more room than what has come takes. */
static void spool_fit(struct spool *s)
{
	if (s->end && s->end < s->size)
		spool_resize(s, s->end);
}

static void spool_put(struct spool *s, const char *bytes, size_t n)
{
	unsigned size = s->size ? s->size : FIRST_SIZE;

	while (size < RING && size < s->end + n)
		size = size < RING / 2 ? 2 * size : RING;
	if (n && size != s->size)
		spool_resize(s, size);
	for (size_t done = 0; done < n;) {
		size_t at = s->end % RING, part = n - done < RING - at ? n - done : RING - at;
		memcpy(s->ring + at, bytes + done, part);
		s->end += part;
		done += part;
	}
	if (s->end - s->start > RING)
		s->start = s->end - RING;
}

static size_t spool_get(const struct spool *s, uint64_t offset, char *into, size_t most)
{
	size_t n = s->end - offset < most ? s->end - offset : most;
	for (size_t done = 0; done < n;) {
		size_t at = (offset + done) % RING, part = n - done < RING - at ? n - done : RING - at;
		memcpy(into + done, s->ring + at, part);
		done += part;
	}
	return n;
}

/* Reads what the pipe holds, at most `most` bytes. Returns 1 if something came, 0 if the pipe is empty, -1 at its end. */
static int spool_fill(struct spool *s, int fd, size_t most)
{
	ssize_t n;

	if (fd < 0)
		return -1;
	if (most > sizeof(scratch))
		most = sizeof(scratch);
	if (!most)
		return 0;
	n = read(fd, scratch, most);
	if (n > 0) {
		spool_put(s, scratch, n);
		return 1;
	}
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return 0;
	return -1;
}
#endif
