/* survey INDEX: which files of an overlay's index have more names than the upper (hidden.h).
 * survey DIR SKIP: what a layer looks like, told on stdout as `trees.digest` hashes it, and then, in 8 bytes, what it takes on disk.
 *
 * For layers of thousands of files, where Python would take longer than CRIU for all the rest; small ones are walked there.
 * Stdin is closed when it has hold of every directory at the top: from then on they may be moved to another one.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "hidden.h"

#define REMAP "link_remap." /* CRIU's own names, which come and go */
#define MOST_TOPS 256

struct linked {
	ino_t inode;
	uint64_t bytes;
};

static struct {
	const char *name;
	int fd;
} tops[MOST_TOPS];

static size_t n_tops;
static struct linked *links;
static size_t n_links, room_links;
static char **waiting;
static size_t n_waiting, room_waiting;
static uint64_t bytes;

static void *grown(void *array, size_t count, size_t *room, size_t size)
{
	if (count < *room)
		return array;
	*room = *room ? *room * 2 : 256;
	array = realloc(array, *room * size);
	if (!array)
		exit(1);
	return array;
}

static int by_name(const void *a, const void *b)
{
	return strcmp(*(char *const *)a, *(char *const *)b);
}

static int by_inode(const void *a, const void *b)
{
	const struct linked *one = a, *other = b;
	return one->inode < other->inode ? -1 : one->inode > other->inode;
}

static void tell(int directory, const char *below, const char *name)
{
	char path[8192], target[4097];
	int regular;
	ssize_t size;
	struct stat st;

	if (fstatat(directory, name, &st, AT_SYMLINK_NOFOLLOW)) {
		if (errno == ENOENT)
			return;
		exit(1);
	}
	if (snprintf(path, sizeof(path), "%s%s%s", below, *below ? "/" : "", name) >= (int)sizeof(path))
		exit(1);
	regular = S_ISREG(st.st_mode);
	fwrite(path, 1, strlen(path) + 1, stdout);
	printf("%u %u %u %lld %lld\n", st.st_mode, st.st_uid, st.st_gid, regular ? (long long)st.st_size : 0,
	       regular ? (long long)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec : 0);
	if (S_ISLNK(st.st_mode)) {
		size = readlinkat(directory, name, target, sizeof(target) - 1);
		if (size < 0)
			exit(1);
		target[size] = 0;
		fwrite(target, 1, size + 1, stdout);
	}
	if (S_ISDIR(st.st_mode)) {
		waiting = grown(waiting, n_waiting, &room_waiting, sizeof(*waiting));
		if (!(waiting[n_waiting++] = strdup(path)))
			exit(1);
	} else if (st.st_nlink > 1) {
		links = grown(links, n_links, &room_links, sizeof(*links));
		links[n_links++] = (struct linked){ st.st_ino, st.st_blocks * 512ull };
	} else {
		bytes += st.st_blocks * 512ull;
	}
}

static void hold_tops(int root)
{
	if (n_waiting > MOST_TOPS)
		return; /* stdin stays open to the end */
	for (; n_tops < n_waiting; n_tops++) {
		tops[n_tops].name = strdup(waiting[n_tops]);
		tops[n_tops].fd = openat(root, waiting[n_tops], O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
		if (!tops[n_tops].name || tops[n_tops].fd < 0)
			exit(1);
	}
	close(STDIN_FILENO);
}

static int opened(int root, const char *below)
{
	int flags = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
	size_t length = strcspn(below, "/");

	for (size_t i = 0; i < n_tops; i++)
		if (!strncmp(tops[i].name, below, length) && !tops[i].name[length])
			return openat(tops[i].fd, below[length] ? below + length + 1 : ".", flags);
	return openat(root, *below ? below : ".", flags);
}

static void list(int root, const char *below, const char *skip)
{
	char **names = NULL;
	size_t n_names = 0, room_names = 0;
	struct dirent *entry;
	int fd = opened(root, below);
	DIR *directory = fd < 0 ? NULL : fdopendir(fd);

	if (!directory)
		exit(1);
	while ((errno = 0, entry = readdir(directory))) {
		const char *name = entry->d_name;

		if (!strcmp(name, ".") || !strcmp(name, "..") || (!*below && !strcmp(name, skip)) || !strncmp(name, REMAP, strlen(REMAP)))
			continue;
		names = grown(names, n_names, &room_names, sizeof(*names));
		if (!(names[n_names++] = strdup(name)))
			exit(1);
	}
	if (errno)
		exit(1);
	qsort(names, n_names, sizeof(*names), by_name);
	for (size_t i = 0; i < n_names; i++) {
		tell(fd, below, names[i]);
		free(names[i]);
	}
	free(names);
	closedir(directory);
}

int main(int argc, char **argv)
{
	int root;

	if (argc == 2)
		return tell_hidden(argv[1]);
	if (argc != 3 || (root = open(argv[1], O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0)
		return 2;
	list(root, "", argv[2]);
	hold_tops(root);
	while (n_waiting) {
		char *below = waiting[--n_waiting];

		list(root, below, argv[2]);
		free(below);
	}
	qsort(links, n_links, sizeof(*links), by_inode);
	for (size_t i = 0; i < n_links; i++)
		if (!i || links[i].inode != links[i - 1].inode)
			bytes += links[i].bytes;
	fwrite(&bytes, sizeof(bytes), 1, stdout);
	return fflush(stdout) || ferror(stdout);
}
