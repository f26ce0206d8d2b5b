/*
 * What the attendant says and hears. Out: 'S' 'F' 0xF5 KIND, four bytes of length (big endian), and the payload; the mark lets a
 * reader who came late, and whose first bytes are the middle of something, find the next beginning. In: KIND and length.
 * Output waits in a buffer of its own, so that somebody who does not read keeps no signal and no key from coming through.
 */
#ifndef FRAMES_H
#define FRAMES_H
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FULL (512u << 10)	/* beyond that the child waits */

struct buffer {
	char *bytes;
	size_t from, to, room;
};

static void put(struct buffer *b, const void *bytes, size_t n)
{
	if (b->from == b->to)
		b->from = b->to = 0;
	if (b->to + n > b->room) {
		memmove(b->bytes, b->bytes + b->from, b->to - b->from);
		b->to -= b->from;
		b->from = 0;
		while (b->to + n > b->room)
			b->room = b->room ? b->room * 2 : 64 << 10;
		if (!(b->bytes = realloc(b->bytes, b->room)))
			_exit(70);
	}
	memcpy(b->bytes + b->to, bytes, n);
	b->to += n;
}

static size_t held(const struct buffer *b) { return b->to - b->from; }

/* Returns -1 when nobody reads any more. */
static int drain(struct buffer *b, int fd)
{
	while (held(b)) {
		ssize_t n = write(fd, b->bytes + b->from, held(b));
		if (n < 0)
			return errno == EAGAIN || errno == EINTR ? 0 : -1;
		b->from += n;
	}
	return 0;
}

static void say(struct buffer *out, char kind, const void *payload, uint32_t n)
{
	unsigned char head[8] = { 'S', 'F', 0xF5, (unsigned char)kind, n >> 24, n >> 16, n >> 8, n };
	put(out, head, sizeof(head));
	put(out, payload, n);
}

static void say_text(struct buffer *out, char kind, const char *text) { say(out, kind, text, strlen(text)); }

/* A whole frame at the beginning of `in`, or 0. */
static int hear(struct buffer *in, char *kind, char **payload, uint32_t *n)
{
	unsigned char *at = (unsigned char *)in->bytes + in->from;

	if (held(in) < 5)
		return 0;
	*n = (uint32_t)at[1] << 24 | at[2] << 16 | at[3] << 8 | at[4];
	if (held(in) - 5 < *n)
		return 0;
	*kind = at[0];
	*payload = (char *)at + 5;
	in->from += 5 + *n;
	return 1;
}

static void unblocked(int fd) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK); }

/* The last words: all of them, whatever it takes. */
static void flush(struct buffer *b)
{
	while (held(b) && drain(b, 1) == 0 && held(b)) {
		struct pollfd p = { .fd = 1, .events = POLLOUT };
		poll(&p, 1, 1000);
	}
}
#endif
