/* The copied-up files in an overlay's index, a line each: inode, whether it has a name that is not in the upper, name in the index.
 * What all that means is said in aliases.py, which looks at small ones itself.
 */
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/xattr.h>
#include <unistd.h>

#define NLINK "trusted.overlay.nlink"
#define MOST_WHITEOUTS 64 /* their inodes: thousands of names are links of a few */

static ino_t whiteouts[MOST_WHITEOUTS];
static size_t n_whiteouts;

static int known(ino_t inode)
{
	for (size_t i = n_whiteouts; i-- > 0;)
		if (whiteouts[i] == inode)
			return 1;
	return 0;
}

static int is_whiteout(const struct dirent *entry)
{
	struct stat st;

	if (known(entry->d_ino))
		return 1;
	if (entry->d_type != DT_CHR && entry->d_type != DT_UNKNOWN)
		return 0;
	if (lstat(entry->d_name, &st))
		exit(1);
	if (!S_ISCHR(st.st_mode) || st.st_rdev)
		return 0;
	if (n_whiteouts < MOST_WHITEOUTS)
		whiteouts[n_whiteouts++] = entry->d_ino;
	return 1;
}

static int is_directory(const struct dirent *entry)
{
	struct stat st;

	if (entry->d_type != DT_UNKNOWN)
		return entry->d_type == DT_DIR;
	if (lstat(entry->d_name, &st))
		exit(1);
	return S_ISDIR(st.st_mode);
}

static int tell_hidden(const char *path)
{
	struct dirent *entry;
	DIR *index;

	if (chdir(path) || !(index = opendir(".")))
		return 2;
	while ((errno = 0, entry = readdir(index))) {
		char count[64];
		ssize_t size;

		if (is_directory(entry) || is_whiteout(entry))
			continue;
		size = lgetxattr(entry->d_name, NLINK, count, sizeof(count) - 1);
		if (size < 0 && errno != ENODATA)
			return 1;
		count[size < 0 ? 0 : size] = 0;
		printf("%llu %d %s\n", (unsigned long long)entry->d_ino, size >= 0 && (strncmp(count, "U-", 2) || atoi(count + 1) > -1),
		       entry->d_name);
	}
	if (errno)
		return 1;
	return fflush(stdout) || ferror(stdout);
}
