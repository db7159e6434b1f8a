-- Look at a slice of the ledger for queued keys that nothing holds: RQ's tools can remove a job
-- (`rq empty`, Job.delete, a stock worker that took it) that the ledger counts on.
--
-- ARGV: run, first bucket, buckets, relist ('1': RQ's queue was seen empty, so a queued key that is
--   neither leased nor parked is in no list; one that meanwhile came into the list is then there
--   twice, which claims skip. '': only look for lost bodies, and for what RQ failed).
-- Returns {relisted, missing...}: keys (16 bytes) whose body must be restored from inputs/.

local run, first, buckets, relist = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4] == '1'
local bits = tonumber(redis.call('HGET', run_key(run), 'bits'))
if not bits then return {0} end
local push, missing = {}, {}

local function look(hex)
  if redis.call('ZSCORE', leases_key(run), hex) then return end
  if redis.call('ZSCORE', parked_key(run), hex) then return end
  local status = redis.call('HGET', rq_job(hex), 'status')
  if status == 'canceled' and redis.call('ZSCORE', rq_canceled(run), hex) then return end
  if redis.call('HEXISTS', rq_job(hex), 'request') == 0 then
    missing[#missing + 1] = to_raw(hex)
  elseif relist or (status == 'failed' and redis.call('ZSCORE', rq_failed(run), hex)) then
    push[#push + 1] = hex
  end
end

for bucket = first, math.min(first + buckets, 2 ^ bits) - 1 do
  local all = redis.call('HGETALL', ledger_stem(run) .. string.format('%x', bucket))
  for i = 1, #all, 2 do
    if string.sub(all[i + 1], 9, 9) == 'q' then look(hex_of(bucket, all[i], bits)) end
  end
end

for _, hex in ipairs(push) do
  -- A job that RQ failed or a stock worker started goes back as if nothing had been.
  redis.call('ZREM', rq_failed(run), hex)
  redis.call('HSET', rq_job(hex), 'status', 'queued')
  redis.call('PERSIST', rq_job(hex))
  redis.call('RPUSH', rq_queue(run), hex)
end
local reply = {#push}
for _, raw in ipairs(missing) do reply[#reply + 1] = raw end
return reply
