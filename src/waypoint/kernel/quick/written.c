/* In CRIU when a snapshot saves only the memory that was written since an earlier one: linked into our own CRIU, where WAYPOINT_WRITTEN
 * in the environment turns it on, and loaded into any other (LD_PRELOAD).
 *
 * CRIU asks the kernel which pages of a process exist. Here "and were written to" is added to the question. The kernel counts a page
 * as written unless it was write-protected in the tracking way (userfaultfd, asynchronous) and not touched since: memory that nobody
 * tracks is all written. What CRIU leaves out for that is in the earlier image, and Waypoint says so in the new one (deltas.py).
 *
 * The question is asked in two steps. CRIU wants to know, too, which pages are those of a file, for which the kernel looks at the
 * page itself and not only at its entry in the page table: ten times slower, so it is asked about the written ones only.
 */
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

struct scan {
	uint64_t size, flags, start, end, walk_end, vec, vec_len, max_pages;
	uint64_t category_inverted, category_mask, category_anyof_mask, return_mask;
};

struct region {
	uint64_t start, end, categories;
};

#define SCAN 0xC0606610UL /* PAGEMAP_SCAN: _IOWR('f', 16, struct scan) */
#define PAGE_IS_WRITTEN (1 << 1)
#define PAGE_IS_PRESENT (1 << 3)
#define PAGE_IS_SWAPPED (1 << 4)
#define PAGE_IS_GUARD (1 << 8)
#define COARSE 256

static long written_in(int fd, struct scan *asked)
{
	struct region coarse[COARSE];
	uint64_t at = asked->start, count = 0;

	while (at < asked->end) {
		struct scan first = {
			.size = sizeof(first),
			.start = at,
			.end = asked->end,
			.vec = (uint64_t)(uintptr_t)coarse,
			.vec_len = COARSE,
			.category_mask = PAGE_IS_WRITTEN,
			.category_anyof_mask = PAGE_IS_PRESENT | PAGE_IS_SWAPPED,
			.return_mask = PAGE_IS_PRESENT,
		};
		long regions = syscall(SYS_ioctl, fd, SCAN, &first);

		if (regions < 0)
			return regions;
		for (long i = 0; i < regions; i++) {
			struct scan second = *asked;
			long found;

			if (count == asked->vec_len) {
				asked->walk_end = coarse[i].start;
				return count;
			}
			second.start = coarse[i].start;
			second.end = coarse[i].end;
			second.vec += count * sizeof(struct region);
			second.vec_len -= count;
			second.category_mask |= PAGE_IS_WRITTEN;
			found = syscall(SYS_ioctl, fd, SCAN, &second);
			if (found < 0)
				return found;
			count += found;
			if (second.walk_end < second.end) {
				asked->walk_end = second.walk_end;
				return count;
			}
		}
		at = first.walk_end;
	}
	asked->walk_end = asked->end;
	return count;
}

int ioctl(int fd, unsigned long request, ...);

int ioctl(int fd, unsigned long request, ...)
{
	va_list rest;
	void *argument;

	va_start(rest, request);
	argument = va_arg(rest, void *);
	va_end(rest);
	if ((request & 0xffffffffUL) == SCAN && argument && getenv("WAYPOINT_WRITTEN")) {
		struct scan *asked = argument;

		/* where guard regions are is another question: those are not pages */
		if (!asked->flags && asked->vec && !asked->max_pages && !(asked->category_mask & PAGE_IS_GUARD))
			return written_in(fd, asked);
	}
	return syscall(SYS_ioctl, fd, request, argument);
}
