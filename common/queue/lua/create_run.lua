-- Create a run, or say what it is. Atomic, so that two producers make one run.
-- ARGV: run, uid, record (JSON), bits, partitions, priority, created (ms), claim order.
-- Returns the record that is stored now; '' while a run of that name is being forgotten; 'foreign'
--   where RQ's queue of that name holds jobs of another program.

local run = ARGV[1]
local stored = redis.call('HGET', run_key(run), 'record')
if stored then return stored end
if redis.call('EXISTS', forgetting_key(run)) == 1 then return '' end
if is_foreign_queue(run) then return 'foreign' end
redis.call('HSET', run_key(run), 'uid', ARGV[2], 'record', ARGV[3], 'bits', ARGV[4],
  'partitions', ARGV[5], 'priority', ARGV[6], 'created_ms', ARGV[7],
  'reconciled', server_run_id())
-- Without it they are lost: recount.lua.
redis.call('HSETNX', counts_key(run), 'total', 0)
redis.call('DEL', tombstone_key(run))
redis.call('ZADD', RUNS, ARGV[8], run)
redis.call('SADD', RQ_QUEUES, rq_queue(run))
return ARGV[3]
