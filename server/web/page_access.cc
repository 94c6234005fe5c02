#include "server/web/page_access.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "extractor/base/digest.h"
#include "proto/messages/html.h"

namespace statetap {
namespace {

constexpr std::string_view kCookie = "statetap_token";

std::string Decoded(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    unsigned value = 0;
    const char* digits = text.data() + i + 1;
    if (text[i] == '%' && i + 2 < text.size() &&
        std::from_chars(digits, digits + 2, value, 16).ptr == digits + 2) {
      out += static_cast<char>(value);
      i += 2;
    } else {
      out += text[i] == '+' ? ' ' : text[i];
    }
  }
  return out;
}

// A path on this server, and nothing that could end a header or name another one.
std::string SafePath(const std::string& path) {
  const bool ours = path.starts_with('/') && !path.starts_with("//") && !path.starts_with("/\\") &&
                    std::ranges::all_of(path, [](char c) { return c > ' ' && c < 0x7f; });
  return ours ? path : "/";
}

std::string ValueOf(const std::map<std::string, std::string>& fields, const std::string& name) {
  const auto found = fields.find(name);
  return found == fields.end() ? "" : found->second;
}

HttpReply SetCookie(std::string_view value, std::string_view more, const std::string& back) {
  HttpReply reply = RedirectTo(SafePath(back));
  reply.headers.emplace_back("Set-Cookie", fmt::format("{}={}; Path=/; HttpOnly; SameSite=Strict{}",
                                                       kCookie, value, more));
  return reply;
}

}  // namespace

std::map<std::string, std::string> FormFields(const std::string& body) {
  std::map<std::string, std::string> fields;
  std::string_view rest = body;
  while (!rest.empty()) {
    const std::string_view pair = rest.substr(0, rest.find('&'));
    rest.remove_prefix(std::min(rest.size(), pair.size() + 1));
    const size_t equals = std::min(pair.find('='), pair.size());
    fields[Decoded(pair.substr(0, equals))] =
        Decoded(pair.substr(std::min(pair.size(), equals + 1)));
  }
  return fields;
}

PageAccess::PageAccess(const std::string& token) {
  if (token.empty()) return;
  token_digest_ = Sha256Hex("token:" + token);
  cookie_ = Sha256Hex("cookie:" + token);
  form_key_ = Sha256Hex("form:" + token);
}

bool PageAccess::HasBearer(const HttpRequest& request) const {
  constexpr std::string_view kBearer = "Bearer ";
  return request.authorization.starts_with(kBearer) &&
         Sha256Hex("token:" + request.authorization.substr(kBearer.size())) == token_digest_;
}

bool PageAccess::Unlocked(const HttpRequest& request) const {
  if (!possible()) return false;
  if (HasBearer(request)) return true;
  std::string_view rest = request.cookies;
  while (!rest.empty()) {
    std::string_view one = rest.substr(0, rest.find(';'));
    rest.remove_prefix(std::min(rest.size(), one.size() + 1));
    while (one.starts_with(' ')) one.remove_prefix(1);
    if (one == fmt::format("{}={}", kCookie, cookie_)) return true;
  }
  return false;
}

bool PageAccess::MayChange(const HttpRequest& request) const {
  return Unlocked(request) &&
         (HasBearer(request) || ValueOf(FormFields(request.body), "key") == form_key_);
}

std::string PageAccess::KeyField() const {
  return fmt::format("<input type=\"hidden\" name=\"key\" value=\"{}\">", form_key_);
}

std::string PageAccess::UnlockForm(const HttpRequest& request) const {
  if (!possible()) return "";
  const std::string back =
      fmt::format("<input type=\"hidden\" name=\"back\" value=\"{}\">", EscapeHtml(request.target));
  if (Unlocked(request)) {
    return fmt::format(
        "<footer><form method=\"post\" action=\"/lock\">{}{}<button>Read only again</button>"
        "</form></footer>\n",
        KeyField(), back);
  }
  return fmt::format(
      "<footer><form method=\"post\" action=\"/unlock\">{}<label>Server token <input "
      "type=\"password\" "
      "name=\"token\" required autocomplete=\"current-password\"></label>"
      "<button>Allow changes</button></form></footer>\n",
      back);
}

HttpReply PageAccess::Unlock(const HttpRequest& post) const {
  const auto fields = FormFields(post.body);
  const bool right = possible() && Sha256Hex("token:" + ValueOf(fields, "token")) == token_digest_;
  if (!right) {
    return {.status = 403, .type = "text/plain", .body = "This is not the server's token.\n"};
  }
  return SetCookie(cookie_, "", ValueOf(fields, "back"));
}

HttpReply PageAccess::Lock(const HttpRequest& post) const {
  return SetCookie("", "; Max-Age=0", ValueOf(FormFields(post.body), "back"));
}

}  // namespace statetap
