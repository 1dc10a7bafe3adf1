// The only bridge from our exceptions to TensorFlow's statuses.
#pragma once

#include <cerrno>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include "sok/error.h"
#include "sok/file_error.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace sok {

inline absl::Status FileStatus(const FileError& e) {
  switch (e.error_number) {
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
      return absl::ResourceExhaustedError(e.what());
    case ENOENT:
      return absl::NotFoundError(e.what());
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::PermissionDeniedError(e.what());
    default:
      return absl::UnknownError(e.what());
  }
}

// What TensorFlow said, on its way through code that throws.
class StatusError : public std::runtime_error {
 public:
  explicit StatusError(absl::Status said) : std::runtime_error(std::string(said.message())), status(std::move(said)) {}
  const absl::Status status;
};

// Runs body; an exception becomes the status of ctx, so none leaves Compute and no check ends the process.
template <class Context, class Body>
void Guard(Context* ctx, Body&& body) {
  absl::Status status;
  try {
    body();
    return;
  } catch (const InvalidArgument& e) {
    status = absl::InvalidArgumentError(e.what());
  } catch (const TableFull& e) {
    status = absl::ResourceExhaustedError(e.what());
  } catch (const OutOfMemory& e) {
    status = absl::ResourceExhaustedError(e.what());
  } catch (const FailedPrecondition& e) {
    status = absl::FailedPreconditionError(e.what());
  } catch (const DeadlineExceeded& e) {
    status = absl::DeadlineExceededError(e.what());
  } catch (const DamagedFile& e) {
    status = absl::DataLossError(e.what());
  } catch (const FileError& e) {
    status = FileStatus(e);
  } catch (const StatusError& e) {
    status = e.status;
  } catch (const std::bad_alloc&) {
    status = absl::ResourceExhaustedError("out of memory");
  } catch (const std::exception& e) {
    status = absl::InternalError(e.what());
  }
  ctx->CtxFailure(__FILE__, __LINE__, status);
}

// For TensorFlow calls inside a guarded body.
inline void Check(const absl::Status& status) {
  if (status.ok()) return;
  if (absl::IsResourceExhausted(status)) throw OutOfMemory(std::string(status.message()));
  if (absl::IsInvalidArgument(status)) throw InvalidArgument(std::string(status.message()));
  throw StatusError(status);
}

}  // namespace sok
