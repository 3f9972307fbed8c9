#include "json.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* Deep enough for every real payload, and far from the end of a 64 KiB stack. */
#define MAX_DEPTH 64

struct reader {
    const char *text;
    size_t len, at;
    const char *reason;
};

/* Where a string's characters go. With `out` NULL they are checked and dropped. */
struct sink {
    char *out;
    size_t cap, len;
};

static bool fail(struct reader *r, const char *reason) {
    if (r->reason == NULL) r->reason = reason;
    return false;
}

/* The end reads as NUL, which is no valid byte anywhere outside a string and refused inside one. */
static char peek(const struct reader *r) { return r->at < r->len ? r->text[r->at] : '\0'; }

static void skip_space(struct reader *r) {
    while (r->at < r->len && strchr(" \t\r\n", r->text[r->at]) != NULL && r->text[r->at] != '\0') r->at++;
}

static bool take(struct reader *r, char c, const char *reason) {
    if (peek(r) != c) return fail(r, reason);
    r->at++;
    return true;
}

static bool put(struct reader *r, struct sink *s, char c) {
    if (s->out == NULL) return true;
    if (s->len + 1 >= s->cap) return fail(r, "the string is too long");
    s->out[s->len++] = c;
    return true;
}

static bool put_utf8(struct reader *r, struct sink *s, uint32_t code) {
    if (code < 0x80) return put(r, s, (char)code);
    if (code < 0x800) return put(r, s, (char)(0xc0 | code >> 6)) && put(r, s, (char)(0x80 | (code & 63)));
    if (code < 0x10000) {
        return put(r, s, (char)(0xe0 | code >> 12)) && put(r, s, (char)(0x80 | (code >> 6 & 63))) &&
               put(r, s, (char)(0x80 | (code & 63)));
    }
    return put(r, s, (char)(0xf0 | code >> 18)) && put(r, s, (char)(0x80 | (code >> 12 & 63))) &&
           put(r, s, (char)(0x80 | (code >> 6 & 63))) && put(r, s, (char)(0x80 | (code & 63)));
}

static bool hex4(struct reader *r, uint32_t *value) {
    *value = 0;
    for (int i = 0; i < 4; i++, r->at++) {
        char c = peek(r);
        uint32_t digit;
        if (c >= '0' && c <= '9') digit = (uint32_t)(c - '0');
        else if (c >= 'a' && c <= 'f') digit = (uint32_t)(c - 'a' + 10);
        else if (c >= 'A' && c <= 'F') digit = (uint32_t)(c - 'A' + 10);
        else return fail(r, "\\u needs four hex digits");
        *value = *value << 4 | digit;
    }
    return true;
}

static bool unicode_escape(struct reader *r, struct sink *s) {
    uint32_t code, low;
    if (!hex4(r, &code)) return false;
    if (code >= 0xd800 && code < 0xdc00) {
        /* Half of a character outside the first plane; the other half must follow at once. */
        if (peek(r) != '\\') return fail(r, "a lone surrogate");
        r->at++;
        if (!take(r, 'u', "a lone surrogate") || !hex4(r, &low)) return false;
        if (low < 0xdc00 || low > 0xdfff) return fail(r, "a lone surrogate");
        code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
    } else if (code >= 0xdc00 && code <= 0xdfff) {
        return fail(r, "a lone surrogate");
    }
    /* What reads the result is C, where a string ends at a NUL. */
    if (code == 0 && s->out != NULL) return fail(r, "the string contains a NUL");
    return put_utf8(r, s, code);
}

static bool string(struct reader *r, struct sink *s) {
    if (!take(r, '"', "expected a string")) return false;
    for (;;) {
        if (r->at >= r->len) return fail(r, "the string does not end");
        unsigned char c = (unsigned char)r->text[r->at++];
        if (c == '"') break;
        if (c < 0x20) return fail(r, "a control character in a string");
        if (c != '\\') {
            if (!put(r, s, (char)c)) return false;
            continue;
        }
        char escape = peek(r);
        r->at++;
        switch (escape) {
        case '"': case '\\': case '/': if (!put(r, s, escape)) return false; break;
        case 'b': if (!put(r, s, '\b')) return false; break;
        case 'f': if (!put(r, s, '\f')) return false; break;
        case 'n': if (!put(r, s, '\n')) return false; break;
        case 'r': if (!put(r, s, '\r')) return false; break;
        case 't': if (!put(r, s, '\t')) return false; break;
        case 'u': if (!unicode_escape(r, s)) return false; break;
        default: return fail(r, "an unknown escape");
        }
    }
    if (s->out != NULL) s->out[s->len] = '\0';
    return true;
}

static bool digits(struct reader *r) {
    if (peek(r) < '0' || peek(r) > '9') return fail(r, "expected a digit");
    while (peek(r) >= '0' && peek(r) <= '9') r->at++;
    return true;
}

static bool number(struct reader *r) {
    if (peek(r) == '-') r->at++;
    if (peek(r) == '0') r->at++;
    else if (!digits(r)) return false;
    if (peek(r) == '.') {
        r->at++;
        if (!digits(r)) return false;
    }
    if (peek(r) == 'e' || peek(r) == 'E') {
        r->at++;
        if (peek(r) == '+' || peek(r) == '-') r->at++;
        if (!digits(r)) return false;
    }
    return true;
}

static bool word(struct reader *r, const char *expected) {
    size_t len = strlen(expected);
    if (r->len - r->at < len || memcmp(r->text + r->at, expected, len) != 0) return fail(r, "expected a value");
    r->at += len;
    return true;
}

static bool value(struct reader *r, int depth);

static bool array(struct reader *r, int depth) {
    r->at++;
    skip_space(r);
    if (peek(r) == ']') { r->at++; return true; }
    for (;;) {
        if (!value(r, depth + 1)) return false;
        skip_space(r);
        if (peek(r) == ']') { r->at++; return true; }
        if (!take(r, ',', "expected , or ]")) return false;
    }
}

/* With `wanted` NULL the object is only checked. */
static bool object(struct reader *r, int depth, const char *wanted, struct sink *s, bool *found) {
    struct sink nowhere = {0};
    if (!take(r, '{', "expected an object")) return false;
    skip_space(r);
    if (peek(r) == '}') { r->at++; return true; }
    for (;;) {
        /* A key that is longer than this is not the wanted one, and then only its syntax matters. */
        char key[64];
        struct sink name = {key, sizeof key, 0};
        skip_space(r);
        size_t start = r->at;
        if (!string(r, &name)) {
            r->at = start, r->reason = NULL, key[0] = '\0';
            if (!string(r, &nowhere)) return false;
        }
        skip_space(r);
        if (!take(r, ':', "expected :")) return false;
        skip_space(r);
        if (wanted != NULL && strcmp(key, wanted) == 0) {
            if (*found) return fail(r, "the field is there twice");
            if (peek(r) != '"') return fail(r, "the field is not a string");
            *found = true;
            if (!string(r, s)) return false;
        } else if (!value(r, depth + 1)) {
            return false;
        }
        skip_space(r);
        if (peek(r) == '}') { r->at++; return true; }
        if (!take(r, ',', "expected , or }")) return false;
    }
}

static bool value(struct reader *r, int depth) {
    struct sink nowhere = {0};
    if (depth > MAX_DEPTH) return fail(r, "nested too deep");
    skip_space(r);
    switch (peek(r)) {
    case '{': return object(r, depth, NULL, NULL, NULL);
    case '[': return array(r, depth);
    case '"': return string(r, &nowhere);
    case 't': return word(r, "true");
    case 'f': return word(r, "false");
    case 'n': return word(r, "null");
    default:
        if (peek(r) == '-' || (peek(r) >= '0' && peek(r) <= '9')) return number(r);
        return fail(r, "expected a value");
    }
}

struct json_error json_string_field(const char *text, size_t len, const char *name, char *out, size_t out_cap) {
    struct reader r = {text, len, 0, NULL};
    struct sink s = {out, out_cap, 0};
    bool found = false;

    skip_space(&r);
    if (object(&r, 0, name, &s, &found)) {
        skip_space(&r);
        if (r.at != r.len) fail(&r, "text after the object");
        else if (!found) fail(&r, "the field is missing");
    }
    return (struct json_error){r.reason, r.at};
}

size_t json_quote(const char *text, char *out) {
    static const char DIGITS[] = "0123456789abcdef";
    char *p = out;
    *p++ = '"';
    for (; *text != '\0'; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\') {
            *p++ = '\\';
            *p++ = (char)c;
        } else if (c < 0x20) {
            memcpy(p, "\\u00", 4);
            p[4] = DIGITS[c >> 4], p[5] = DIGITS[c & 15];
            p += 6;
        } else {
            *p++ = (char)c;
        }
    }
    *p++ = '"';
    *p = '\0';
    return (size_t)(p - out);
}
