/*
 * Frames on the unix socket: u32 length of the payload, u8 type, u32 command id, payload (little endian, packed).
 * The same table stands in guest/frames.py; a test compares the two.
 */
#ifndef WIRE_H
#define WIRE_H
#include <stdint.h>

#define WIRE_VERSION 1
#define MAX_FRAME (16u << 20)

/* client -> init */
#define F_HELLO 'H'	/* -> F_STATE */
#define F_EXEC 'X'	/* u8 flags, command text */
#define F_RUN 'R'	/* u8 flags, then NUL-terminated: user, cwd, u32 argc as text, argv..., env... */
#define F_INPUT 'I'	/* u64 offset, stdin bytes from there; no bytes close it */
#define F_SIGNAL 'K'	/* u8 signal number, to the command in the header */
#define F_END 'E'	/* end the command: INT, then TERM, then KILL, then the shell itself */
#define F_FOLLOW 'A'	/* u64 stdout offset, u64 stderr offset: stream a command from there */
#define F_TERMINAL 'T'	/* u16 rows, u16 cols, u64 offset: become a terminal that has seen all before offset, if it is still known */
#define F_KEYS 't'	/* terminal bytes, either way */
#define F_RESIZE 'W'	/* u16 rows, u16 cols */
#define F_QUIESCE 'Q'	/* drop every connection, then F_READY, then close this one too */
#define F_BACKGROUND 'B' /* -> the log of what background jobs printed after their command returned */

/* init -> client */
#define F_STATE 's'	/* text: key=value lines */
#define F_STARTED 'x'
#define F_STDOUT 'o'	/* u64 offset, bytes */
#define F_STDERR 'e'
#define F_DONE 'd'	/* i32 status, u8 shell died, u64 lost stdout, u64 lost stderr, cwd */
#define F_BUSY 'b'
#define F_READY 'q'
#define F_ERROR '!'	/* text */
#define F_LOG 'g'
#define F_TAKEN 'i'	/* u64 stdin bytes received, u64 taken by the command's pipe, all ones when no more are wanted */
#define F_SCREEN 'r'	/* u64 offset, before and after what a terminal missed; the first tells where that begins */
#define F_ENDED 'z'	/* to terminals: the shell ended of itself */

#define EXEC_INPUT 1	/* stdin will be sent; otherwise it is /dev/null */
#define EXEC_NO_WAIT 2	/* answer F_BUSY rather than queue */
#define EXEC_MERGE 4	/* stderr into stdout, in exact order */
#define EXEC_OURS 8	/* Waypoint's own question to the shell: not the last command that anybody asked for */

struct frame {
	uint32_t length;
	uint8_t type;
	uint32_t id;
} __attribute__((packed));
#endif
