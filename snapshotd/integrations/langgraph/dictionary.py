"""The dictionary that pieces and checkpoints are compressed with: what the serialised messages of LangChain and the
checkpoints of LangGraph have in common, so that a message takes little more room than its own words.

Part of format 1, so it may never change: stored bytes need it to be read. Another one is another mark in front of them
(codec.py).
"""

from __future__ import annotations

CONTENT = (
    b"\xc7\xc9\x05\x94\xbelangchain_core.messages.system\xadSystemMessage\x86\xa7content\xbc\xb1additional_kwar"
    b"gs\x80\xb1response_metadata\x80\xa4type\xa6system\xa4name\xc0\xa2id\xd9$00000000-0000-4000-8000-000000000"
    b"000\xb3model_validate_json\xc7\xaa\x05\x94\xbdlangchain_core.messages.human\xacHumanMessage\x86\xa7conten"
    b"t\xa0\xb1additional_kwargs\x80\xb1response_metadata\x80\xa4type\xa5human\xa4name\xc0\xa2id\xd9$00000000-0"
    b"000-4000-8000-000000000000\xb3model_validate_json\xc8\x03\x03\x05\x94\xbalangchain_core.messages.ai\xa9AI"
    b"Message\x89\xa7content\xa0\xb1additional_kwargs\x80\xb1response_metadata\x88\xabtoken_usage\x85\xb1comple"
    b"tion_tokens\x10\xadprompt_tokens\xcd\x01\x00\xactotal_tokens\xcd\x01\x10\xb9completion_tokens_details\x84"
    b"\xbaaccepted_prediction_tokens\x00\xacaudio_tokens\x00\xb0reasoning_tokens\x00\xbarejected_prediction_tok"
    b"ens\x00\xb5prompt_tokens_details\x82\xacaudio_tokens\x00\xadcached_tokens\x00\xaemodel_provider\xa6openai"
    b"\xaamodel_name\xa4gpt-\xb2system_fingerprint\xa3fp_\xa2id\xa9chatcmpl-\xacservice_tier\xa7default\xadfini"
    b"sh_reason\xaatool_calls\xa8logprobs\xc0\xa4type\xa2ai\xa4name\xc0\xa2id\xd9,lc_run--00000000-0000-7000-80"
    b"00-000000000000\xaatool_calls\x91\x84\xa4name\xa6search\xa4args\x83\xa5query\xa0\xa4path\xa0\xa7command"
    b"\xa0\xa2id\xa5call_\xa4type\xa9tool_call\xb2invalid_tool_calls\x90\xaeusage_metadata\x85\xacinput_tokens"
    b"\xcd\x01\x00\xadoutput_tokens\x10\xactotal_tokens\xcd\x01\x10\xb3input_token_details\x82\xa5audio\x00\xaa"
    b"cache_read\x00\xb4output_token_details\x82\xa5audio\x00\xa9reasoning\x00\xb3model_validate_json\xc8\x02"
    b"\xb2\x05\x94\xbalangchain_core.messages.ai\xa9AIMessage\x89\xa7content\x92\x82\xa4type\xa4text\xa4text"
    b"\xa0\x84\xa4type\xa8tool_use\xa2id\xa8toolu_01\xa4name\xa0\xa5input\x80\xb1additional_kwargs\x80\xb1respo"
    b"nse_metadata\x87\xa2id\xa6msg_01\xa5model\xa7claude-\xabstop_reason\xa8end_turn\xadstop_sequence\xc0\xa5u"
    b"sage\x88\xaecache_creation\x82\xb9ephemeral_1h_input_tokens\x00\xb9ephemeral_5m_input_tokens\x00\xbbcache"
    b"_creation_input_tokens\x00\xb7cache_read_input_tokens\x00\xadinference_geo\xc0\xacinput_tokens\xcd\x01,"
    b"\xadoutput_tokens\x14\xafserver_tool_use\xc0\xacservice_tier\xa8standard\xaamodel_name\xa7claude-\xaemode"
    b"l_provider\xa9anthropic\xa4type\xa2ai\xa4name\xc0\xa2id\xd9,lc_run--00000000-0000-7000-8000-000000000000"
    b"\xaatool_calls\x90\xb2invalid_tool_calls\x90\xaeusage_metadata\x84\xacinput_tokens\xcd\x01,\xadoutput_tok"
    b"ens\x14\xactotal_tokens\xcd\x01@\xb3input_token_details\x82\xaecache_creation\x00\xaacache_read\x00\xb3mo"
    b"del_validate_json\xc7\xd9\x05\x94\xbalangchain_core.messages.ai\xa9AIMessage\x89\xa7content\xa0\xb1additi"
    b"onal_kwargs\x80\xb1response_metadata\x80\xa4type\xa2ai\xa4name\xc0\xa2id\xd9,lc_run--00000000-0000-7000-8"
    b"000-000000000000\xaatool_calls\x90\xb2invalid_tool_calls\x90\xaeusage_metadata\xc0\xb3model_validate_json"
    b"\xc7\xd9\x05\x94\xbclangchain_core.messages.tool\xabToolMessage\x89\xa7content\xa0\xb1additional_kwargs"
    b"\x80\xb1response_metadata\x80\xa4type\xa4tool\xa4name\xa6search\xa2id\xd9$00000000-0000-4000-8000-0000000"
    b"00000\xactool_call_id\xa5call_\xa8artifact\xc0\xa6status\xa7success\xb3model_validate_json\x85\xa1v\x04"
    b"\xa2ts\xd9 2026-11-25T07:00:00.000000+00:00\xb0channel_versions\x84\xa9__start__\x02\xa8messages\x03\xafb"
    b"ranch:to:model\x04\xafbranch:to:tools\x04\xadversions_seen\x84\xa9__input__\x80\xa9__start__\x81\xa9__sta"
    b"rt__\x01\xa5model\x81\xafbranch:to:model\x02\xa5tools\x81\xafbranch:to:tools\x03\xb0updated_channels\x92"
    b"\xa8messages\xafbranch:to:tools"
)
