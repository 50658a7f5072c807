#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace fox {

/// A mistake that a user can mend. `what()` names the thing that is wrong, `hint()` says how to mend it; the command
/// line prints them as one `error:` and one `hint:` line and exits with `exit_code()`.
class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& what, std::string hint = "", int exit_code = 1)
      : std::runtime_error(what), hint_(std::move(hint)), exit_code_(exit_code) {}

  const std::string& hint() const noexcept { return hint_; }
  int exit_code() const noexcept { return exit_code_; }

 private:
  std::string hint_;
  int exit_code_;
};

/// A command line or a run file that cannot be understood at all (exit code 2).
class UsageError : public Error {
 public:
  explicit UsageError(const std::string& what, std::string hint = "") : Error(what, std::move(hint), 2) {}
};

/// A number in the middle of a computation is NaN where none may be. Training takes it as a step that failed, others as
/// the Error that it is.
class NonFiniteError : public Error {
 public:
  using Error::Error;
};

}  // namespace fox
