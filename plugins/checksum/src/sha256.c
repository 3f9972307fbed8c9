#include "sha256.h"

#include <string.h>

static const uint32_t START[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

static inline uint32_t rotr(uint32_t x, int n) { return (x >> n) | (x << (32 - n)); }

static inline uint32_t load_be(const uint8_t *p) {
    uint32_t word;
    memcpy(&word, p, 4);
    /* WebAssembly and every machine that the tests run on are little-endian. */
    return __builtin_bswap32(word);
}

static inline void store_be(uint8_t *p, uint32_t word) {
    word = __builtin_bswap32(word);
    memcpy(p, &word, 4);
}

/* One round without moving the eight variables: the caller renames them instead, which costs nothing. */
#define ROUND(a, b, c, d, e, f, g, h, k, w)                                                        \
    do {                                                                                           \
        uint32_t t = h + (rotr(e, 6) ^ rotr(e, 11) ^ rotr(e, 25)) + (g ^ (e & (f ^ g))) + (k) + (w); \
        d += t;                                                                                    \
        h = t + (rotr(a, 2) ^ rotr(a, 13) ^ rotr(a, 22)) + ((a & b) | (c & (a | b)));              \
    } while (0)

/* The schedule is kept as a window of sixteen words; word i is made just before round i needs it. */
#define FRESH(i) (w[i] = load_be(block + 4 * (i)))
#define NEXT(i)                                                                                    \
    (w[i] += (rotr(w[((i) + 14) & 15], 17) ^ rotr(w[((i) + 14) & 15], 19) ^ (w[((i) + 14) & 15] >> 10)) + \
             w[((i) + 9) & 15] +                                                                   \
             (rotr(w[((i) + 1) & 15], 7) ^ rotr(w[((i) + 1) & 15], 18) ^ (w[((i) + 1) & 15] >> 3)))

#define SIXTEEN(W, k0, k1, k2, k3, k4, k5, k6, k7, k8, k9, k10, k11, k12, k13, k14, k15) \
    ROUND(a, b, c, d, e, f, g, h, k0, W(0));                                             \
    ROUND(h, a, b, c, d, e, f, g, k1, W(1));                                             \
    ROUND(g, h, a, b, c, d, e, f, k2, W(2));                                             \
    ROUND(f, g, h, a, b, c, d, e, k3, W(3));                                             \
    ROUND(e, f, g, h, a, b, c, d, k4, W(4));                                             \
    ROUND(d, e, f, g, h, a, b, c, k5, W(5));                                             \
    ROUND(c, d, e, f, g, h, a, b, k6, W(6));                                             \
    ROUND(b, c, d, e, f, g, h, a, k7, W(7));                                             \
    ROUND(a, b, c, d, e, f, g, h, k8, W(8));                                             \
    ROUND(h, a, b, c, d, e, f, g, k9, W(9));                                             \
    ROUND(g, h, a, b, c, d, e, f, k10, W(10));                                           \
    ROUND(f, g, h, a, b, c, d, e, k11, W(11));                                           \
    ROUND(e, f, g, h, a, b, c, d, k12, W(12));                                           \
    ROUND(d, e, f, g, h, a, b, c, k13, W(13));                                           \
    ROUND(c, d, e, f, g, h, a, b, k14, W(14));                                           \
    ROUND(b, c, d, e, f, g, h, a, k15, W(15))

static void blocks(uint32_t state[8], const uint8_t *block, size_t count) {
    uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
    uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
    uint32_t w[16];

    for (; count > 0; count--, block += 64) {
        uint32_t a0 = a, b0 = b, c0 = c, d0 = d, e0 = e, f0 = f, g0 = g, h0 = h;

        SIXTEEN(FRESH, 0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
                0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174);
        SIXTEEN(NEXT, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
                0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967);
        SIXTEEN(NEXT, 0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
                0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070);
        SIXTEEN(NEXT, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
                0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2);

        a += a0, b += b0, c += c0, d += d0, e += e0, f += f0, g += g0, h += h0;
    }

    state[0] = a, state[1] = b, state[2] = c, state[3] = d;
    state[4] = e, state[5] = f, state[6] = g, state[7] = h;
}

void sha256_start(struct sha256 *s) {
    memset(s, 0, sizeof *s);
    memcpy(s->state, START, sizeof START);
}

void sha256_update(struct sha256 *s, const void *data, size_t len) {
    const uint8_t *p = data;
    s->bytes += len;

    if (s->rest_len > 0) {
        size_t take = 64 - s->rest_len;
        if (take > len) take = len;
        memcpy(s->rest + s->rest_len, p, take);
        s->rest_len += take, p += take, len -= take;
        if (s->rest_len < 64) return;
        blocks(s->state, s->rest, 1);
        s->rest_len = 0;
    }

    blocks(s->state, p, len / 64);
    s->rest_len = len % 64;
    memcpy(s->rest, p + (len - s->rest_len), s->rest_len);
}

void sha256_finish_hex(struct sha256 *s, char hex[SHA256_HEX_LEN + 1]) {
    static const char DIGITS[] = "0123456789abcdef";
    /* A one bit, zeros up to the last eight bytes of a block, and the length in bits. */
    uint8_t padding[128] = {0x80};
    size_t zeros_end = s->rest_len < 56 ? 56 : 120;
    size_t padding_len = zeros_end - s->rest_len;
    uint64_t bits = s->bytes * 8;

    store_be(padding + padding_len, (uint32_t)(bits >> 32));
    store_be(padding + padding_len + 4, (uint32_t)bits);
    sha256_update(s, padding, padding_len + 8);

    for (int i = 0; i < 8; i++) {
        for (int nibble = 0; nibble < 8; nibble++) {
            hex[8 * i + nibble] = DIGITS[(s->state[i] >> (28 - 4 * nibble)) & 15];
        }
    }
    hex[SHA256_HEX_LEN] = '\0';
}
