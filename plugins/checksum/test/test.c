/* Runs natively: the digest against published vectors, the JSON reader against good and bad texts. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../src/json.h"
#include "../src/sha256.h"

static int failed = 0;

static void check(int ok, const char *what) {
    if (ok) return;
    failed++;
    fprintf(stderr, "failed: %s\n", what);
}

/* `step` is the size of each update: the digest must not depend on how the input was cut. */
static void digest_is(const char *data, size_t len, size_t step, const char *expected) {
    struct sha256 sha;
    char hex[SHA256_HEX_LEN + 1];
    sha256_start(&sha);
    for (size_t at = 0; at < len; at += step) sha256_update(&sha, data + at, len - at < step ? len - at : step);
    sha256_finish_hex(&sha, hex);
    check(strcmp(hex, expected) == 0, expected);
}

static void sha256_vectors(void) {
    digest_is("", 0, 1, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    digest_is("abc", 3, 3, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    digest_is("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", 56, 7,
              "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    char *million = malloc(1000000);
    memset(million, 'a', 1000000);
    for (size_t step = 1; step <= 1000000; step = step * 7 + 3) {
        digest_is(million, 1000000, step, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
    }
    free(million);
}

/* Each length around the block's end pads differently; the steps must agree with the digest in one piece. */
static void sha256_cuts(void) {
    char data[200];
    for (size_t i = 0; i < sizeof data; i++) data[i] = (char)(i * 37);
    for (size_t len = 0; len <= sizeof data; len++) {
        struct sha256 sha;
        char hex[SHA256_HEX_LEN + 1];
        sha256_start(&sha);
        sha256_update(&sha, data, len);
        sha256_finish_hex(&sha, hex);
        digest_is(data, len, 1, hex);
        digest_is(data, len, 63, hex);
    }
}

static void field_is(const char *text, const char *expected) {
    char out[64] = "";
    struct json_error error = json_string_field(text, strlen(text), "file", out, sizeof out);
    check(error.reason == NULL && strcmp(out, expected) == 0, text);
}

static void refused(const char *text, const char *reason) {
    char out[64];
    struct json_error error = json_string_field(text, strlen(text), "file", out, sizeof out);
    check(error.reason != NULL && strcmp(error.reason, reason) == 0, text);
}

static void json_fields(void) {
    field_is("{\"file\":\"a.bin\"}", "a.bin");
    field_is(" { \"x\" : [1, -2.5e+3, {\"file\": \"inner\"}, true, null, \"\\u0000\"] ,\n\"file\" : \"b\\/c\" } ", "b/c");
    field_is("{\"file\":\"\\u00e9\\ud83d\\ude00\\t\"}", "\xc3\xa9\xf0\x9f\x98\x80\t");
    field_is("{\"a-key-that-is-much-longer-than-the-sixty-four-bytes-which-are-kept-of-it\":{},\"file\":\"x\"}", "x");
    field_is("{\"fi\\u006ce\":\"x\"}", "x");

    refused("", "expected an object");
    refused("\"file\"", "expected an object");
    refused("{}", "the field is missing");
    refused("{\"file\":7}", "the field is not a string");
    refused("{\"file\":\"a\",\"file\":\"b\"}", "the field is there twice");
    refused("{\"file\":\"a\"} x", "text after the object");
    refused("{\"file\":\"a\"", "expected , or }");
    refused("{\"file\":\"a\",}", "expected a string");
    refused("{\"file\":\"a", "the string does not end");
    refused("{\"file\":\"a\n\"}", "a control character in a string");
    refused("{\"file\":\"\\ud83d\"}", "a lone surrogate");
    refused("{\"file\":\"\\ude00\"}", "a lone surrogate");
    refused("{\"file\":\"a\\u0000b\"}", "the string contains a NUL");
    refused("{\"file\":\"\\x\"}", "an unknown escape");
    refused("{\"n\":01,\"file\":\"a\"}", "expected , or }");
    refused("{\"n\":tru,\"file\":\"a\"}", "expected a value");
    refused("{\"n\":[1,],\"file\":\"a\"}", "expected a value");
    refused("{\"file\":\"0123456789012345678901234567890123456789012345678901234567890123456789\"}", "the string is too long");

    char deep[400] = "{\"n\":";
    memset(deep + 5, '[', 300);
    deep[305] = '\0';
    refused(deep, "nested too deep");
}

static void json_quoting(void) {
    const char *text = "a\"b\\c\n\xc3\xa9";
    char *out = malloc(json_quoted_cap(strlen(text)));
    size_t len = json_quote(text, out);
    check(strcmp(out, "\"a\\\"b\\\\c\\u000a\xc3\xa9\"") == 0, "quoting");
    check(len == strlen(out), "length of the quoted text");
    free(out);
}

int main(void) {
    sha256_vectors();
    sha256_cuts();
    json_fields();
    json_quoting();
    if (failed == 0) puts("checksum: all passed");
    return failed != 0;
}
