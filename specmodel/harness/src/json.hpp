// A small JSON value, parser and writer: enough for job files and records, without a dependency.
// Numbers are doubles (exact for integers to 2^53); object keys keep their order; duplicate keys are errors.
#pragma once

#include <cctype>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "errors.hpp"

namespace specmodel {

class Json {
public:
    using Array = std::vector<Json>;
    using Member = std::pair<std::string, Json>;
    using Object = std::vector<Member>;

    Json() = default;
    Json(std::nullptr_t) {}
    Json(bool flag) : value_(flag) {}
    Json(double number) : value_(number) {}
    Json(int number) : value_(static_cast<double>(number)) {}
    Json(std::int64_t number) : value_(static_cast<double>(number)) {}
    Json(std::size_t number) : value_(static_cast<double>(number)) {}
    Json(const char* text) : value_(std::string(text)) {}
    Json(std::string text) : value_(std::move(text)) {}
    Json(Array items) : value_(std::move(items)) {}
    Json(Object members) : value_(std::move(members)) {}

    // One array of numbers.
    static Json numbers(const std::vector<double>& values) {
        Array items;
        items.reserve(values.size());
        for (double v : values) items.emplace_back(v);
        return Json(std::move(items));
    }

    bool is_null() const { return std::holds_alternative<std::nullptr_t>(value_); }
    bool is_bool() const { return std::holds_alternative<bool>(value_); }
    bool is_number() const { return std::holds_alternative<double>(value_); }
    bool is_string() const { return std::holds_alternative<std::string>(value_); }
    bool is_array() const { return std::holds_alternative<Array>(value_); }
    bool is_object() const { return std::holds_alternative<Object>(value_); }

    bool boolean() const { return std::get<bool>(value_); }
    double number() const { return std::get<double>(value_); }
    const std::string& text() const { return std::get<std::string>(value_); }
    const Array& items() const { return std::get<Array>(value_); }
    const Object& members() const { return std::get<Object>(value_); }

    // The member of that name, or nullptr.
    const Json* find(std::string_view key) const {
        if (!is_object()) return nullptr;
        for (const auto& [name, member] : members())
            if (name == key) return &member;
        return nullptr;
    }

    // Sets (or adds) a member of an object; a null value becomes an object.
    Json& set(std::string_view key, Json member) {
        if (is_null()) value_ = Object{};
        auto& object = std::get<Object>(value_);
        for (auto& [name, old] : object)
            if (name == key) {
                old = std::move(member);
                return *this;
            }
        object.emplace_back(std::string(key), std::move(member));
        return *this;
    }

    // One line of JSON. Numbers that are not finite become null: JSON has no NaN.
    std::string dump() const {
        std::string out;
        write(out);
        return out;
    }

    static Json parse(std::string_view source);

private:
    std::variant<std::nullptr_t, bool, double, std::string, Array, Object> value_{nullptr};

    static void write_text(std::string& out, std::string_view text) {
        out += '"';
        for (char c : text) {
            auto byte = static_cast<unsigned char>(c);
            if (c == '"' || c == '\\') {
                out += '\\';
                out += c;
            } else if (byte < 0x20) {
                char escaped[8];
                std::snprintf(escaped, sizeof escaped, "\\u%04x", byte);
                out += escaped;
            } else {
                out += c;
            }
        }
        out += '"';
    }

    static void write_number(std::string& out, double number) {
        if (!std::isfinite(number)) {
            out += "null";
            return;
        }
        char digits[32];
        if (number == std::floor(number) && std::fabs(number) < 9.0e15)
            std::snprintf(digits, sizeof digits, "%.0f", number);
        else
            std::snprintf(digits, sizeof digits, "%.9g", number);
        out += digits;
    }

    void write(std::string& out) const {
        if (is_null()) {
            out += "null";
        } else if (is_bool()) {
            out += boolean() ? "true" : "false";
        } else if (is_number()) {
            write_number(out, number());
        } else if (is_string()) {
            write_text(out, text());
        } else if (is_array()) {
            out += '[';
            bool first = true;
            for (const auto& item : items()) {
                if (!first) out += ", ";
                first = false;
                item.write(out);
            }
            out += ']';
        } else {
            out += '{';
            bool first = true;
            for (const auto& [name, member] : members()) {
                if (!first) out += ", ";
                first = false;
                write_text(out, name);
                out += ": ";
                member.write(out);
            }
            out += '}';
        }
    }
};

namespace detail {

class JsonParser {
public:
    explicit JsonParser(std::string_view source) : source_(source) {}

    Json document() {
        Json value = any(0);
        blank();
        if (at_ != source_.size()) fail("text after the end of the document");
        return value;
    }

private:
    std::string_view source_;
    std::size_t at_ = 0;
    static constexpr int deepest = 64;

    [[noreturn]] void fail(const std::string& what) const {
        std::size_t line = 1;
        for (std::size_t i = 0; i < at_ && i < source_.size(); ++i) line += source_[i] == '\n';
        throw UsageError("not JSON: " + what + " on line " + std::to_string(line));
    }

    void blank() {
        while (at_ < source_.size() &&
               (source_[at_] == ' ' || source_[at_] == '\t' || source_[at_] == '\n' || source_[at_] == '\r'))
            ++at_;
    }

    char peek() {
        blank();
        if (at_ >= source_.size()) fail("the document ends too early");
        return source_[at_];
    }

    void expect(char c) {
        if (peek() != c) fail(std::string("expected '") + c + "', found '" + source_[at_] + "'");
        ++at_;
    }

    bool word(std::string_view text) {
        if (source_.substr(at_, text.size()) != text) return false;
        at_ += text.size();
        return true;
    }

    Json any(int depth) {
        if (depth > deepest) fail("nested too deeply");
        char c = peek();
        if (c == '{') return object(depth);
        if (c == '[') return array(depth);
        if (c == '"') return Json(string());
        if (word("true")) return Json(true);
        if (word("false")) return Json(false);
        if (word("null")) return Json(nullptr);
        return number();
    }

    Json object(int depth) {
        expect('{');
        Json result{Json::Object{}};
        if (peek() == '}') {
            ++at_;
            return result;
        }
        while (true) {
            if (peek() != '"') fail("an object's key must be a string");
            std::string key = string();
            if (result.find(key)) fail("duplicate key '" + key + "'");
            expect(':');
            result.set(key, any(depth + 1));
            if (peek() == '}') break;
            expect(',');
        }
        ++at_;
        return result;
    }

    Json array(int depth) {
        expect('[');
        Json::Array items;
        if (peek() == ']') {
            ++at_;
            return Json(std::move(items));
        }
        while (true) {
            items.push_back(any(depth + 1));
            if (peek() == ']') break;
            expect(',');
        }
        ++at_;
        return Json(std::move(items));
    }

    Json number() {
        std::size_t start = at_;
        auto digits = [&] {
            std::size_t first = at_;
            while (at_ < source_.size() && std::isdigit(static_cast<unsigned char>(source_[at_]))) ++at_;
            if (at_ == first) fail("expected a value");
        };
        if (source_[at_] == '-') ++at_;
        std::size_t integer = at_;
        digits();
        if (source_[integer] == '0' && at_ > integer + 1) fail("a number must not start with 0");
        if (at_ < source_.size() && source_[at_] == '.') {
            ++at_;
            digits();
        }
        if (at_ < source_.size() && (source_[at_] == 'e' || source_[at_] == 'E')) {
            ++at_;
            if (at_ < source_.size() && (source_[at_] == '+' || source_[at_] == '-')) ++at_;
            digits();
        }
        double value = std::strtod(std::string(source_.substr(start, at_ - start)).c_str(), nullptr);
        if (!std::isfinite(value)) fail("a number is out of range");
        return Json(value);
    }

    unsigned hex4() {
        unsigned code = 0;
        for (int i = 0; i < 4; ++i, ++at_) {
            if (at_ >= source_.size() || !std::isxdigit(static_cast<unsigned char>(source_[at_])))
                fail("a bad \\u escape");
            char c = source_[at_];
            code = code * 16 + static_cast<unsigned>(c <= '9' ? c - '0' : (c | 0x20) - 'a' + 10);
        }
        return code;
    }

    void append_utf8(std::string& out, unsigned code) {
        auto byte = [&](unsigned b) { out += static_cast<char>(b); };
        if (code < 0x80) {
            byte(code);
        } else if (code < 0x800) {
            byte(0xC0 | (code >> 6));
            byte(0x80 | (code & 0x3F));
        } else if (code < 0x10000) {
            byte(0xE0 | (code >> 12));
            byte(0x80 | ((code >> 6) & 0x3F));
            byte(0x80 | (code & 0x3F));
        } else {
            byte(0xF0 | (code >> 18));
            byte(0x80 | ((code >> 12) & 0x3F));
            byte(0x80 | ((code >> 6) & 0x3F));
            byte(0x80 | (code & 0x3F));
        }
    }

    std::string string() {
        expect('"');
        std::string out;
        while (true) {
            if (at_ >= source_.size()) fail("a string is not closed");
            char c = source_[at_++];
            if (c == '"') return out;
            if (static_cast<unsigned char>(c) < 0x20) fail("a control character in a string");
            if (c != '\\') {
                out += c;
                continue;
            }
            if (at_ >= source_.size()) fail("a string is not closed");
            char escape = source_[at_++];
            static constexpr std::string_view letters = "\"\\/bfnrt";
            static constexpr std::string_view meanings = "\"\\/\b\f\n\r\t";
            if (auto which = letters.find(escape); which != std::string_view::npos) {
                out += meanings[which];
            } else if (escape == 'u') {
                unsigned code = hex4();
                if (code >= 0xD800 && code < 0xDC00) {
                    if (!word("\\u")) fail("a lone surrogate");
                    unsigned low = hex4();
                    if (low < 0xDC00 || low > 0xDFFF) fail("a lone surrogate");
                    code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
                } else if (code >= 0xDC00 && code < 0xE000) {
                    fail("a lone surrogate");
                }
                append_utf8(out, code);
            } else {
                fail(std::string("unknown escape '\\") + escape + "'");
            }
        }
    }
};

}  // namespace detail

inline Json Json::parse(std::string_view source) {
    return detail::JsonParser(source).document();
}

}  // namespace specmodel
