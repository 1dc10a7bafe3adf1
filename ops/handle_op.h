// Handles of resources that an op makes: by name, or as long as somebody holds the handle.
#pragma once

#include <string>

#include "op.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace sok {

template <class Resource>
class HandleOp : public GuardedOp {
 public:
  explicit HandleOp(OpKernelConstruction* ctx) : GuardedOp(ctx) {
    Check(ctx->GetAttr("container", &container_));
    Check(ctx->GetAttr("shared_name", &shared_name_));
    Check(ctx->GetAttr("anonymous", &anonymous_));
    if (shared_name_.empty()) shared_name_ = name();
  }

 private:
  virtual Resource* Make(OpKernelContext* ctx) const = 0;

  void Run(OpKernelContext* ctx) override {
    auto& handle = ScalarOutput<tensorflow::ResourceHandle>(ctx, 0);
    if (anonymous_) {
      // The handle counts references: what it is of lives as long as a variable, a traced function or a model holds it.
      handle = tensorflow::ResourceHandle::MakeRefCountingHandle(Make(ctx), ctx->device()->name());
      return;
    }
    handle = tensorflow::MakeResourceHandle<Resource>(ctx, container_, shared_name_);
    RefCountPtr<Resource> resource;
    Check(tensorflow::LookupOrCreateResource<Resource>(ctx, handle, &resource, [&](Resource** made) {
      *made = Make(ctx);
      return absl::OkStatus();
    }));
  }

  std::string container_, shared_name_;
  bool anonymous_ = false;
};

}  // namespace sok
