/* The frames between StateFork and the agent; ../wire.py is the same table.
 *
 * A frame is kind, a zero byte, a channel (16 bits), the payload's length (32 bits), all little-endian, and the payload.
 * A zero where a kind should be is padding of one byte: whoever sends PADDING zeros first finds the other side at the
 * beginning of a frame, whatever was cut off before (a snapshot taken in the middle of a frame, a client that died).
 */
#ifndef WIRE_H
#define WIRE_H
#include <stdint.h>

#define MAX_PAYLOAD 32768
#define WINDOW 4194304 /* bytes of output that may be under way on one channel */
#define STDIN_WINDOW 65536

enum kind {
	/* from the host */
	K_HELLO = 'H',   /* nonce[16], wall clock in ns (64), seed[32], channel to keep (16) */
	K_PART = 'x',    /* the beginning of a K_SPAWN that is too long for one frame */
	K_SPAWN = 'X',   /* argc (16), envc (16), then strings that end in NUL: user, cwd, argv, env */
	K_STDIN = 'I',
	K_STDIN_END = 'E',
	K_SIGNAL = 'K',  /* number (8), to the process group */
	K_GRANT = 'G',   /* bytes (32); also from the guest, for stdin */
	K_FORGET = 'F',  /* nobody listens to this channel any more; its process goes on */
	K_CLOCK = 'T',   /* wall clock in ns (64) */
	K_LIST = 'L',    /* answered by K_LIST: command lines, each ends in NUL */
	K_SYNC = 'Y',    /* all files to the disk; answered by K_SYNC when they are there */
	K_FREEZE = 'Z',  /* 1: all files to the disk and let nothing change; 0: go on. Answered by K_FREEZE: errno (32) */
	/* from the guest */
	K_STARTED = 'S', /* pid (32) */
	K_FAILED = 'f',  /* errno (32), what failed */
	K_STDOUT = 'O',
	K_STDERR = 'R',
	K_EXIT = 'e',    /* exit code or 128 + signal (32) */
};

struct frame {
	uint8_t kind, zero;
	uint16_t channel;
	uint32_t length;
} __attribute__((packed));
#endif
