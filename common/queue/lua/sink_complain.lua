-- Say for `producer status` why a sink stores nothing of a run. Works when Redis is full.
--
-- ARGV: run, uid, why ('' takes it back). Returns {'unknown'} or {'ok'}.

begin_even_when_full()
local run, uid, why = ARGV[1], ARGV[2], ARGV[3]
if redis.call('HGET', run_key(run), 'uid') ~= uid then return {'unknown'} end
if why == '' then
  redis.call('HDEL', run_key(run), 'sink_error', 'sink_error_ms')
else
  redis.call('HSET', run_key(run), 'sink_error', why, 'sink_error_ms', now_ms())
end
return {'ok'}
