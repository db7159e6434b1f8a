-- Give leased jobs back to the front of their queues. Works when Redis is full.
--
-- ARGV: epoch, server, why ('' nothing charged | 'death' the server died with it), then pairs: run, key.
-- A drained server is about to be stopped: that it dies says nothing of what was open there.
-- Jobs that were in flight at two server deaths are parked: the claim hands them out by themselves.
-- Returns one word a pair: queued | parked | not_held | removed (RQ's tools cancelled it, or took its
--   body away, while it was held: not listed).

begin_even_when_full()
local epoch, why = ARGV[1], ARGV[3]
if drain_of(ARGV[2]) then why = '' end
local now = now_ms()
local reply = {}

local function give_back(run, raw)
  local hex = to_hex(raw)
  if not redis.call('ZSCORE', leases_key(run), hex) then return 'not_held' end
  if not holds(run, hex, epoch) then return 'not_held' end
  if not release_unended(run, hex) then return 'removed' end
  local deaths = why == 'death' and redis.call('HINCRBY', rq_job(hex), 'deaths', 1) or 0
  local alone = redis.call('HGET', rq_job(hex), 'alone')
  if deaths > 0 then note_death(run, now, 'a server died or stood still') end
  if deaths > 0 and alone == '1' then redis.call('HINCRBY', rq_job(hex), 'died_alone', 1) end
  if deaths >= 2 or alone then
    park(run, hex, now)
    return 'parked'
  end
  redis.call('LPUSH', rq_queue(run), hex)
  return 'queued'
end

-- Backwards, so that the first of the batch ends up first in the queue.
for i = #ARGV - 1, 4, -2 do table.insert(reply, 1, give_back(ARGV[i], ARGV[i + 1])) end
return reply
