-- Make a run that this Redis lacks from what the store says of it. It stays unreconciled, so that
-- nothing is claimed and no sink reads before the store's records are taught.
--
-- ARGV: run, uid, record (JSON), bits, partitions, created (ms), claim order, priority, cancelled
--   ('1' or ''), identity of the pinned model (JSON or ''), window (or ''), then pairs: counter, value,
--   of what only progress.json remembers.
-- Returns {'ok', record that stands now}, {'forgetting'} while a run of that name is
--   forgotten, or {'foreign'}: RQ's queue of that name holds jobs of another program.

local run = ARGV[1]
local stored = redis.call('HGET', run_key(run), 'record')
if stored then return {'ok', stored} end
if redis.call('EXISTS', forgetting_key(run)) == 1 then return {'forgetting'} end
if is_foreign_queue(run) then return {'foreign'} end
redis.call('HSET', run_key(run), 'uid', ARGV[2], 'record', ARGV[3], 'bits', ARGV[4],
  'partitions', ARGV[5], 'priority', ARGV[8], 'created_ms', ARGV[6])
if ARGV[9] ~= '' then redis.call('HSET', run_key(run), 'cancelled', ARGV[9]) end
if ARGV[10] ~= '' then redis.call('HSET', run_key(run), 'pinned', ARGV[10]) end
if ARGV[11] ~= '' then redis.call('HSET', run_key(run), 'window', ARGV[11]) end
for i = 12, #ARGV, 2 do redis.call('HSET', counts_key(run), ARGV[i], ARGV[i + 1]) end
-- Without it they are lost: recount.lua.
redis.call('HSETNX', counts_key(run), 'total', 0)
redis.call('DEL', tombstone_key(run))
redis.call('ZADD', RUNS, ARGV[7], run)
redis.call('SADD', RQ_QUEUES, rq_queue(run))
return {'ok', ARGV[3]}
