/* SHA-256 (FIPS 180-4), streaming. No allocation, no input or output, no global state. */
#ifndef CHECKSUM_SHA256_H
#define CHECKSUM_SHA256_H

#include <stddef.h>
#include <stdint.h>

struct sha256 {
    uint32_t state[8];
    uint64_t bytes;
    /* What is left of the last update, always less than a block. */
    uint8_t rest[64];
    size_t rest_len;
};

#define SHA256_HEX_LEN 64

void sha256_start(struct sha256 *s);
void sha256_update(struct sha256 *s, const void *data, size_t len);
/* Writes 64 lower-case hex digits and a NUL. The state is used up afterwards. */
void sha256_finish_hex(struct sha256 *s, char hex[SHA256_HEX_LEN + 1]);

#endif
