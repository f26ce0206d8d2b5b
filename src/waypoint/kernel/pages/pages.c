/* What PAGEMAP_SCAN has told of a process, by the ten thousand regions: saved as CRIU's pages and pagemap (regions.py).
 *
 * A library and no program: it is used while a session stands still, and to start one would take as long as its work.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

struct region {
	uint64_t start, end, kind;
};

#define WRITTEN (1 << 1)
#define PAGE 4096
#define CHUNK (1 << 20)
#define MOST_PIECES 1024 /* IOV_MAX */
#define OWN (1ULL << 63 | 1ULL << 56) /* what pagemap says of a page that is in memory, and in no other process */
#define IN_PARENT 1
#define PRESENT 4

struct batch {
	pid_t pid;
	int file, mem, pagemap;
	off_t at;
	char *buffer;
	struct iovec pieces[MOST_PIECES];
	size_t count, size;
};

static bool are_own(const struct batch *batch)
{
	uint64_t told[CHUNK / PAGE];

	for (size_t i = 0; i < batch->count; i++) {
		size_t pages = batch->pieces[i].iov_len / PAGE;
		off_t place = (uintptr_t)batch->pieces[i].iov_base / PAGE * sizeof(told[0]);

		if (pread(batch->pagemap, told, pages * sizeof(told[0]), place) != (ssize_t)(pages * sizeof(told[0])))
			return false;
		while (pages--)
			if ((told[pages] & OWN) != OWN)
				return false;
	}
	return true;
}

/* By process_vm_readv() the kernel would give the process a page of its own for each that it shares. */
static bool get(struct batch *batch)
{
	struct iovec here = { batch->buffer, batch->size };
	char *at = batch->buffer;

	if (are_own(batch))
		return process_vm_readv(batch->pid, &here, 1, batch->pieces, batch->count, 0) == (ssize_t)batch->size;
	for (size_t i = 0; i < batch->count; i++) {
		ssize_t size = batch->pieces[i].iov_len;

		if (pread(batch->mem, at, size, (uintptr_t)batch->pieces[i].iov_base) != size)
			return false;
		at += size;
	}
	return true;
}

static int put(struct batch *batch)
{
	char *at = batch->buffer;

	if (!batch->size)
		return 0;
	if (!get(batch)) {
		errno = EFAULT; /* what is read in part is as good as not read */
		return -1;
	}
	while (batch->size) {
		ssize_t done = pwrite(batch->file, at, batch->size, batch->at);

		if (done < 0 && errno == EINTR)
			continue;
		if (done < 0)
			return -1;
		at += done;
		batch->at += done;
		batch->size -= done;
	}
	batch->count = 0;
	return 0;
}

static int open_files(struct batch *batch)
{
	char path[32];

	snprintf(path, sizeof(path), "/proc/%d/mem", batch->pid);
	batch->mem = open(path, O_RDONLY | O_CLOEXEC);
	snprintf(path, sizeof(path), "/proc/%d/pagemap", batch->pid);
	batch->pagemap = open(path, O_RDONLY | O_CLOEXEC);
	return batch->mem < 0 || batch->pagemap < 0 ? -1 : 0;
}

/* The written ones, one after the other: of that file what is in it from here up to there, so that two threads can make one.
 * 0, or -1 with errno; EFAULT: some of it cannot be read.
 */
int save_written(pid_t pid, int file, const struct region *regions, size_t count, uint64_t from, uint64_t to)
{
	struct batch *batch = malloc(sizeof(*batch));
	uint64_t passed = 0;
	int error = 0;

	if (!batch)
		return -1;
	*batch = (struct batch){ .pid = pid, .file = file, .mem = -1, .pagemap = -1, .at = from, .buffer = malloc(CHUNK) };
	if (!batch->buffer)
		error = ENOMEM;
	else if (open_files(batch))
		error = errno;
	for (size_t i = 0; i < count && passed < to && !error; i++) {
		uint64_t at = regions[i].start, end = regions[i].end, skipped;

		if (!(regions[i].kind & WRITTEN))
			continue;
		skipped = passed < from ? from - passed : 0;
		passed += end - at;
		if (passed > to)
			end -= passed - to;
		for (at += skipped; at < end;) {
			size_t size = end - at;

			if (batch->size == CHUNK || batch->count == MOST_PIECES) {
				if (put(batch)) {
					error = errno;
					break;
				}
			}
			if (size > CHUNK - batch->size)
				size = CHUNK - batch->size;
			batch->pieces[batch->count++] = (struct iovec){ (void *)(uintptr_t)at, size };
			batch->size += size;
			at += size;
		}
	}
	if (!error && put(batch))
		error = errno;
	if (batch->mem >= 0)
		close(batch->mem);
	if (batch->pagemap >= 0)
		close(batch->pagemap);
	free(batch->buffer);
	free(batch);
	errno = error;
	return error ? -1 : 0;
}

static char *number(char *to, uint64_t value)
{
	for (; value > 127; value >>= 7)
		*to++ = value | 128;
	*to++ = value;
	return to;
}

/* An entry of a pagemap for each, behind its size: the written ones are in this image, the others in its parent.
 * There must be room for 40 bytes each; returns how many were used.
 */
size_t write_entries(const struct region *regions, size_t count, char *to)
{
	char *at = to;

	for (size_t i = 0; i < count; i++) {
		uint64_t pages = (regions[i].end - regions[i].start) / PAGE;
		char *entry = at + 4;
		uint32_t size;

		at = number(entry, 1 << 3); /* vaddr */
		at = number(at, regions[i].start);
		at = number(at, 2 << 3); /* compat_nr_pages */
		at = number(at, (uint32_t)pages);
		at = number(at, 4 << 3); /* flags */
		at = number(at, regions[i].kind & WRITTEN ? PRESENT : IN_PARENT);
		at = number(at, 5 << 3); /* nr_pages */
		at = number(at, pages);
		size = at - entry;
		memcpy(entry - 4, &size, sizeof(size));
	}
	return at - to;
}

/* What touches made one, written or not; returns how many there are, or -1 if they are not in order or told twice. */
size_t merge(const struct region *regions, size_t count, struct region *to)
{
	size_t found = 0;

	for (size_t i = 0; i < count; i++) {
		if (regions[i].start >= regions[i].end || (i && regions[i].start < regions[i - 1].end))
			return -1;
		if (found && to[found - 1].end == regions[i].start)
			to[found - 1].end = regions[i].end;
		else
			to[found++] = regions[i];
	}
	return found;
}

uint64_t written_bytes(const struct region *regions, size_t count)
{
	uint64_t bytes = 0;

	for (size_t i = 0; i < count; i++)
		if (regions[i].kind & WRITTEN)
			bytes += regions[i].end - regions[i].start;
	return bytes;
}
