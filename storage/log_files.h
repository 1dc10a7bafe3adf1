// Files of RowLogs in a folder: their names, and which of them stay when their processes are gone.
#pragma once

#include <string>

namespace sok {

// A name that no other log has: `folder`/`name`.RANDOM.rows.
std::string NewLogName(const std::string& folder, const std::string& name);

// Removes logs of processes that are gone, which have them locked no more, but for those that a shard names.
void RemoveLogsLeftOver(const std::string& folder);

// Removes a log, and its note of shards.
void RemoveLog(const std::string& log);

// Whether somebody has removed the shard, and not put its storage away for a while: where it was there is something else.
bool IsShardGone(const std::string& shard);

// The file of a shard will name the log: as long as it does, the log stays. Throws FileError.
void NoteShardOfLog(const std::string& log, const std::string& shard);

}  // namespace sok
