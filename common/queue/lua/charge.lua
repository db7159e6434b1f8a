-- Charge an attempt to a prompt that its process goes on holding.
--
-- ARGV: epoch, run, key (16 bytes), reason (one word), attempts before this one, or '' when the caller
--   does not know them: a call that repeats itself after a lost answer finds more and charges nothing.
-- Returns the attempts so far in this try; 0 when the process does not hold the job.

local epoch, run, hex = ARGV[1], ARGV[2], to_hex(ARGV[3])
-- Of a run that is being forgotten the leases go last: nothing of it may be made anew.
if redis.call('HEXISTS', run_key(run), 'uid') == 0 then return 0 end
if not redis.call('ZSCORE', leases_key(run), hex) or not holds(run, hex, epoch) then return 0 end
local attempts = tonumber(redis.call('HGET', rq_job(hex), 'attempts') or 0)
if ARGV[5] ~= '' and attempts > tonumber(ARGV[5]) then return attempts end
count(run, 'retries', 1)
note_fault(run, ARGV[4])
return redis.call('HINCRBY', rq_job(hex), 'attempts', 1)
