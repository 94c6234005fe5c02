// Who may change things from the web page: a browser that was shown the server's token, and keeps
// it as a cookie; or a program that sends it.
#pragma once

#include <map>
#include <string>

#include "server/web/http_message.h"

namespace statetap {

// The fields of a form as browsers post it (application/x-www-form-urlencoded).
std::map<std::string, std::string> FormFields(const std::string& body);

class PageAccess {
 public:
  // Empty: nobody may.
  explicit PageAccess(const std::string& token);

  bool possible() const { return !token_digest_.empty(); }
  bool Unlocked(const HttpRequest& request) const;
  // Whether this POST may change something: it has the token itself, or comes from a form that this
  // server made for a browser that has it. Another site's page can send the cookie along, but does
  // not know the form's key.
  bool MayChange(const HttpRequest& request) const;
  // A form's hidden field: for pages of whom the page is unlocked.
  std::string KeyField() const;

  // The two below post what this shows, and come back to where it was shown.
  std::string UnlockForm(const HttpRequest& request) const;
  HttpReply Unlock(const HttpRequest& post) const;
  HttpReply Lock(const HttpRequest& post) const;

 private:
  bool HasBearer(const HttpRequest& request) const;
  std::string token_digest_, cookie_, form_key_;
};

}  // namespace statetap
