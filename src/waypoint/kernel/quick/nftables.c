/* Instead of nftables: CRIU locks a network with it, if it is told to. */
#include "stand_in.h"

ABSENT(nft_ctx_buffer_error)
ABSENT(nft_ctx_buffer_output)
ABSENT(nft_ctx_free)
ABSENT(nft_ctx_get_error_buffer)
ABSENT(nft_ctx_new)
ABSENT(nft_ctx_set_error)
ABSENT(nft_ctx_set_output)
ABSENT(nft_run_cmd_from_buffer)
