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

struct spool {
	int fd;			/* read end; -1 when ended */
	char *ring;
	uint64_t start, end;	/* offsets of the oldest byte kept and of the next one */
};

static size_t spool_room(const struct spool *s, uint64_t consumer) { return RING - (size_t)(s->end - consumer); }

static void spool_put(struct spool *s, const char *bytes, size_t n)
{
	if (!s->ring && !(s->ring = malloc(RING)))
		_exit(70);
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
static int spool_fill(struct spool *s, size_t most)
{
	static char buffer[64 << 10];
	ssize_t n;

	if (s->fd < 0)
		return -1;
	if (most > sizeof(buffer))
		most = sizeof(buffer);
	if (!most)
		return 0;
	n = read(s->fd, buffer, most);
	if (n > 0) {
		spool_put(s, buffer, n);
		return 1;
	}
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return 0;
	return -1;
}
#endif
