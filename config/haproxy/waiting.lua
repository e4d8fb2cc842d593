-- HAProxy's agent-check, answered by HAProxy itself: the weight of a host, from the length of its queue.
--
-- leastconn compares what it has sent to each host, and divides by the weight. So a host's weight is the share of its
-- requests that came through here: 100 % where all did, 50 % where as many came by another way, and so on.
-- Where the proxies have api_keys, one of them must be in the environment, as GPU_LEASE_KEY.
local key = os.getenv("GPU_LEASE_KEY")
local headers = key and {authorization = {"Bearer " .. key}}

core.register_service("waiting", "tcp", function(applet)
    local name = applet:getline():gsub("%s", "")
    local server = core.backends["gpus"].servers[name]
    local url = "http://" .. server:get_addr() .. "/-/queue"
    local answer = core.httpclient():get{url = url, headers = headers, timeout = 1000}
    if answer.status ~= 200 then
        return -- no answer leaves the weight as it is; whether the host is up is the health check's business
    end
    -- One of these for each request that waits, or runs: inside a name their quotes would be escaped.
    local _, waiting = answer.body:gsub('"position":', "")
    local _, running = answer.body:gsub('"held_seconds":', "")
    local share = (server:get_stats()["scur"] + 1) / (waiting + running + 1)
    applet:send(string.format("%d%%\n", math.max(1, math.min(100, math.floor(100 * share)))))
end)
